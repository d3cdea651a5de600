"""Length and format shaping: small rewards beside the one for being right."""

from __future__ import annotations

import re

from miles.config import ConfigError
from miles.data.types import Prompt, Sample


def length(sample: Sample, *, prompt: Prompt, text: str, max_tokens: int, buffer: int) -> float:
    """Soft punishment of overlong responses, in -1..0 (DAPO, arXiv 2503.14476, equation 13).

    0 up to `max_tokens - buffer` response tokens, then falling linearly to -1 at `max_tokens`, and -1 beyond.
    Example: max_tokens 100, buffer 20: 80 tokens give 0, 90 give -0.5, 100 and more give -1.
    """
    over = sample.response_length - (max_tokens - buffer)
    return -min(max(over, 0) / buffer, 1.0)


def matches(sample: Sample, *, prompt: Prompt, text: str, pattern: str) -> float:
    """1.0 if the regular expression `pattern` is found in the response (the dot matches newlines), else 0.0.

    Example: `^<think>.+</think>.+$` asks for thinking, then an answer. A pattern can take exponential time, so it runs in a worker.
    """
    return float(re.search(pattern, text, re.DOTALL) is not None)


def check_length(*, max_tokens: int, buffer: int) -> None:
    """Raises ConfigError where `length` cannot work with these."""
    if not 1 <= buffer <= max_tokens:
        raise ConfigError(f"reward length: buffer = {buffer} must lie in 1..max_tokens = {max_tokens}")


def check_matches(*, pattern: str) -> None:
    """Raises ConfigError for what is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"reward format: pattern = {pattern!r} is no regular expression: {error}") from error
