"""Inference engines behind one contract (`contracts.py`)."""
