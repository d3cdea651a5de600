"""What a training step keeps, and for how long: which activations are stored, compressed or computed again."""
