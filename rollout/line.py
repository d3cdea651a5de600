"""Whose turn it is at an engine that decodes a bounded number of sequences at once, so that a deadline need not count the wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class _Waiting:
    sequences: int
    on_turn: Callable[[], None] | None


class Line:
    """Groups at one engine, served in the order in which they come.

    A group has its turn when the sequences of those before it are fewer than the engine's `places`: its first one then needs a place
    no later than the group ahead of it ends. Engines admit single sequences, so it may have started sooner, never later.

    Example: 4 places, groups of 2: the first and the second have their turn at once, the third when either of them has left.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._groups: list[_Waiting] = []

    @contextmanager
    def joined(self, sequences: int, on_turn: Callable[[], None]) -> Iterator[None]:
        """In line with a group of `sequences`, until the block ends. `on_turn` is called once, here or when another group leaves."""
        group = _Waiting(sequences, on_turn)
        self._groups.append(group)
        self._call()
        try:
            yield
        finally:
            self._groups.remove(group)
            self._call()

    def _call(self) -> None:
        ahead = 0
        for group in self._groups:
            if ahead >= self._places:
                return
            if group.on_turn is not None:
                on_turn, group.on_turn = group.on_turn, None
                on_turn()
            ahead += group.sequences
