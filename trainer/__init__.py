"""Trainer backends, the trainer actor and its roles."""
