"""Engines, rewards, filters, claims and the buffer: everything that turns prompts into finished groups."""
