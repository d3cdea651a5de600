"""1 for the right answer, letter by letter."""

from __future__ import annotations

from miles.data.types import Prompt, Sample


def exact_match(sample: Sample, *, prompt: Prompt, text: str, column: str = "answer", ignore_case: bool = False) -> float:
    """1.0 if `text` equals the row's answer apart from white space around it, else 0.0. A list of answers means any of them.

    Raises:
        KeyError: the row has no `column`.
    """
    answer = prompt.columns[column]
    answers = [str(a).strip() for a in (answer if isinstance(answer, list) else [answer])]
    given = text.strip()
    if ignore_case:
        return float(given.casefold() in [a.casefold() for a in answers])
    return float(given in answers)
