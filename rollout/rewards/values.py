"""What a reward function gave back: a number, or one for each step, or the kind of failure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np


class RewardError(RuntimeError):
    """Reward functions keep failing, or cannot run. The message names the function and carries its last traceback."""


@dataclass(frozen=True)
class Failure:
    """A call that gave no reward. `kind`, as counters name it: none, nan, infinite, string, list, steps (not one number for each), type
    (anything else that is no number), raised, timeout or crashed (its process died). `detail`: the value, or the traceback."""

    kind: str
    detail: str


Answer = float | list[float]
"""A reward, or one for each step."""


def answered(value: Any, steps: Sequence[str] | None) -> Answer | Failure:
    """`value` as a finite float or, of a function that was given `steps`, as one for each of them; or why it is none."""
    if steps is None:
        return checked(value)
    if not isinstance(value, (list, tuple, np.ndarray)) or len(value) != len(steps):
        return Failure("steps", f"it returned {value!r:.200} ({type(value).__name__}); a list of {len(steps)} numbers is needed, one for each step")
    numbers = [checked(element) for element in value]
    failed = next((n for n in numbers if isinstance(n, Failure)), None)
    return failed if failed is not None else [n for n in numbers if not isinstance(n, Failure)]


def checked(value: Any) -> float | Failure:
    """`value` as a finite float, or why it is none. Booleans and NumPy scalars are numbers; a list of one number is not."""
    if value is None:
        return Failure("none", "it returned None")
    if isinstance(value, (Real, np.bool_)):
        number = float(value)
        if math.isfinite(number):
            return number
        return Failure("nan" if math.isnan(number) else "infinite", f"it returned {value!r}")
    if isinstance(value, str):
        kind = "string"
    elif isinstance(value, (list, tuple, np.ndarray)):
        kind = "list"
    else:
        kind = "type"
    return Failure(kind, f"it returned {value!r:.200} ({type(value).__name__}); one number is needed")
