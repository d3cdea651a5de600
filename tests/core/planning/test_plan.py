"""A plan that cannot be run as it stands is not valid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miles.core.planning.plan import Pass, Plan, Segment, Step

LENGTHS = [4, 5]
"""[1 2 3 7] and [1 2 3 8 9]."""


def example() -> Plan:
    segments = (
        Segment(sample=0, start=0, stop=3, parent=None, scored_from=3, count=2),
        Segment(sample=0, start=3, stop=4, parent=0, scored_from=3),
        Segment(sample=1, start=3, stop=5, parent=0, scored_from=3),
    )
    steps = (Step(kind="prefill", number=0), Step(kind="replay", number=1), Step(kind="backward", number=0))
    passes = (Pass(segments=(0,)), Pass(segments=(1, 2), samples=(0, 1)))
    return Plan(segments=segments, passes=passes, steps=steps, ends={0: 1, 1: 2}, capacity=6, tokens=9)


def test_the_example_is_valid_and_computes_six_of_nine_tokens() -> None:
    plan = example()
    plan.validate(LENGTHS)
    assert plan.computed == 6


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"passes": (Pass(segments=(0,)), Pass(segments=(1,), samples=(0, 1)))}, "in no pass"),
        ({"passes": (Pass(segments=(0,)), Pass(segments=(1, 2), samples=(0,)))}, "never taken"),
        ({"ends": {0: 0, 1: 2}}, "ends at 3 of 4"),
        ({"steps": (Step(kind="replay", number=1), Step(kind="prefill", number=0), Step(kind="backward", number=0))}, "do not exist"),
        ({"steps": (Step(kind="prefill", number=0), Step(kind="replay", number=1))}, "no backward"),
        ({"steps": (Step(kind="prefill", number=0), Step(kind="backward", number=0), Step(kind="replay", number=1))}, "do not exist"),
        ({"steps": (*example().steps, Step(kind="replay", number=1))}, "runs twice"),
        ({"capacity": 5}, "6 tokens at once"),
        ({"tokens": 8}, "not those of its samples"),
    ],
)
def test_a_broken_plan_is_named(broken: dict[str, object], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        replace(example(), **broken).validate(LENGTHS)  # type: ignore[arg-type]


def test_one_path_alone_may_be_longer_than_the_capacity() -> None:
    plan = example()
    steps = (Step(kind="prefill", number=0), Step(kind="replay", number=1), Step(kind="replay", number=2), Step(kind="backward", number=0))
    passes = (Pass(segments=(0,)), Pass(segments=(1,), samples=(0,)), Pass(segments=(2,), samples=(1,)))
    replace(plan, passes=passes, steps=steps, capacity=1).validate(LENGTHS)
