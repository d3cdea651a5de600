"""A teacher in engines of its own: actors that score what students wrote."""
