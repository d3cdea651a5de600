from __future__ import annotations

from contextlib import ExitStack

from rollout.line import Line


def test_groups_have_their_turn_in_order_as_far_as_there_are_places() -> None:
    line, turns = Line(4), list[str]()
    with ExitStack() as later:
        with ExitStack() as first:
            for name in ("a", "b"):
                first.enter_context(line.joined(2, lambda name=name: turns.append(name)))  # type: ignore[misc]
            for name in ("c", "d", "e"):
                later.enter_context(line.joined(3, lambda name=name: turns.append(name)))  # type: ignore[misc]
            assert turns == ["a", "b"]
        assert turns == ["a", "b", "c", "d"]  # the fourth place is the first one that d can have


def test_a_group_larger_than_the_engine_has_its_turn_too() -> None:
    line, turns = Line(2), list[str]()
    with line.joined(5, lambda: turns.append("a")):
        with line.joined(5, lambda: turns.append("b")):
            assert turns == ["a"]
        with line.joined(5, lambda: turns.append("c")):
            pass
    assert turns == ["a"]
