"""Memory by producer and consumer lifetimes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core.planning.residency import Residency, Resident
from miles.run.report.memory import draw

MIB = 2**20


def resident(size: int, first: int, last: int, kind: str = "prompts") -> Resident:
    return Resident(name=f"{kind} {first}-{last}", kind=kind, bytes=size, first=first, last=last)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 4)), max_size=8))
def test_bytes_of_every_moment(spans: list[tuple[int, int, int]]) -> None:
    held = np.zeros(5, int)
    for size, a, b in spans:
        held[min(a, b) : max(a, b) + 1] += size
    made = Residency(moments=tuple("abcde"), residents=tuple(resident(size, min(a, b), max(a, b)) for size, a, b in spans))
    assert [made.at(moment) for moment in range(5)] == held.tolist()
    assert made.peak == held.argmax()


def test_a_peak_above_the_budget_names_the_moment_and_what_is_there() -> None:
    residents = resident(40 * MIB, 0, 2, "weights"), resident(60 * MIB, 0, 1), resident(40 * MIB, 1, 2, "gradients")
    made = Residency(moments=("answers", "replay 1", "optimizer"), residents=residents, budget=139 * MIB)
    with pytest.raises(ValueError, match=r"140 MiB are needed at 'replay 1', above the budget of 139 MiB; the largest: prompts 0-1 60"):
        made.check()
    Residency(moments=made.moments, residents=residents, budget=140 * MIB).check()


def test_the_picture_is_to_scale() -> None:
    residents = resident(30 * MIB, 0, 1, "weights"), resident(60 * MIB, 1, 1)
    (axes,) = draw(Residency(moments=("answers", "replay"), residents=residents, budget=100 * MIB), "a rank").axes
    assert [(bar.get_y(), bar.get_height()) for bars in axes.containers for bar in bars] == [(0, 30), (0, 30), (30, 0), (30, 60)]
    assert [line.get_ydata()[0] for line in axes.lines] == [100]
