"""A reward for each step of an answer, for quickstart_gigpo.toml and quickstart_turn_grpo.toml, where every letter is a step."""

from __future__ import annotations

from collections.abc import Sequence

from miles.data.types import Prompt, Sample


def letters(sample: Sample, *, prompt: Prompt, text: str, steps: Sequence[str]) -> list[float]:
    """Each letter in its right place earns its share of 1, and each one too many loses as much."""
    answer = str(prompt.columns["answer"])
    right = [step == letter for step, letter in zip(steps, answer, strict=False)]
    return [1 / len(answer) if good else 0.0 for good in right] + [-1 / len(answer)] * (len(steps) - len(right))
