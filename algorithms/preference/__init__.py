"""Objectives on preferences. Sequence log-probs in, one loss a pair (or a sample) out; the caller divides by the step's count."""
