"""Samples, groups and batches; prompt datasets; chat templates and masks; packing."""
