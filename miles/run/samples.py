"""Samples as a table for people to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles.data.types import Group


def sample_table(groups: Sequence[Group], tokenizer: Any, rows: int) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a table of samples: the first sample of the first groups."""
    columns = ["prompt", "response", "reward", "tokens", "status"]
    table = []
    for group in groups[:rows]:
        sample = group.samples[0]
        text = tokenizer.decode(sample.response_tokens.tolist())
        table.append([group.prompt.text, text, sample.reward, sample.response_length, str(sample.status)])
    return columns, table
