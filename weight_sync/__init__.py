"""Weights from trainer shards to engine shards, inside a transaction."""
