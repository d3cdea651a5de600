"""1 for an answer that is mathematically equal to the right one, judged by math-verify.

math-verify bounds its own time with SIGALRM, which works in a process's main thread only. Its limits are off here, and the deadline is
that of the worker process that this reward runs in; so it also works from threads and subprocesses.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from typing import Any

from math_verify import parse, verify

from miles.data.types import Prompt, Sample

# It warns once that its time limits are off, which is meant.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:percent|\\?%)\s*\}|\bpercent\b)")
_PERCENT_NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?|\.\d+)" + _PERCENT.pattern)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_MATHS_LENGTH = 200
"""Longest response, in characters, that may as a whole be one formula."""


def equivalent(sample: Sample, *, prompt: Prompt, text: str, column: str = "answer", percent: bool = False) -> float:
    r"""1.0 if the response's final answer equals the row's, else 0.0 (also when no answer is found).

    The final answer is the content of the last `\boxed{}`; without one, the whole response if it is nothing but a formula; else what
    math-verify finds behind "the answer is" and the like, or the last formula. What follows it may be as long as it likes.

    Example: `1/2`, `0.5`, `\frac12` and `\dfrac{1}{2}` are equal; `1,000` is 1000; `(1,2,3)` is neither `(1,2)` nor `1`.

    Args:
        percent: False: a percent sign is a unit that is dropped, so `50\%` is 50 and not 0.5; True: `50\%` is 0.5 and not 50.
    Raises:
        KeyError: the row has no `column`. ValueError: the row's answer is no mathematical expression.
    """
    answer = prompt.columns[column]
    right = _parse_formula(_percent(_as_text(answer), percent))
    if not right:
        raise ValueError(f"the column {column!r} of prompt {prompt.prompt_id} is no mathematical expression: {answer!r}")
    return float(verify(right, _parse_response(text, percent), timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{}` or `\fbox{}`, nested braces included; None without one."""
    last = None
    opened: list[int | None] = []  # for each open brace, where a box's content begins, or None for a brace of another kind
    for match in _BRACE.finditer(text):
        token = match[0]
        if token.endswith("{") and len(token) != 2:
            opened.append(match.end() if len(token) > 1 else None)
        elif token == "}" and opened:
            begin = opened.pop()
            last = last if begin is None else text[begin : match.start()]
    return last


def _parse_response(text: str, percent: bool) -> list[Any]:
    boxed = last_boxed(text)
    if boxed is not None:
        return _parse_formula(_percent(boxed, percent))
    whole = text.strip()
    if len(whole) <= _MATHS_LENGTH and "\n" not in whole and not _WORD.search(whole):
        return _parse_formula(_percent(whole, percent))
    return parse(_percent(text, percent), parsing_timeout=None)


def _parse_formula(text: str) -> list[Any]:
    inner = text.strip().removeprefix("$$").removesuffix("$$").strip("$").strip().removesuffix(".")
    boxed = last_boxed(inner)
    return parse(f"${inner if boxed is None else boxed}$", parsing_timeout=None)


def _percent(text: str, divide: bool) -> str:
    if not divide:
        return _PERCENT.sub("", text)
    return _PERCENT_NUMBER.sub(lambda match: format(Decimal(match[1].replace(",", "")) / 100, "f"), text)


def _as_text(answer: Any) -> str:
    """JSON numbers in plain notation: 1e-07 would be read as a product with Euler's number."""
    return format(Decimal(repr(answer)), "f") if isinstance(answer, float) else str(answer)
