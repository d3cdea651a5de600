"""Objectives as pure functions on tensors: advantages, policy losses, KL. One algorithm is one small file."""
