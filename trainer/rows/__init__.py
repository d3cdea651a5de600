"""Batches, rows and meters: what every trainer backend makes of groups of samples before a model sees them."""
