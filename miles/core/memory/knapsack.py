"""Which layers keep, compress or recompute: the most time saved under a budget of memory and one of risk.

    maximise  sum of seconds saved      over one action for every layer of every micro-batch
    such that at each moment of each micro-batch's backward, and at its end of forward, what is held fits into memory,
              and the risks of all compressed layers add up to the risk budget at most

Micro-batches follow each other, so each has the whole memory; the risk is the update's. The memory of a layer's own backward depends on the layers
below it alone, so walking from the first layer up, (bytes held, risk, seconds saved) says all there is to know of a choice: a choice for which
another one holds no more, risks no more and saves no less is let go (Nemhauser and Ullmann, Management Science 15(9), 1969). What is left at the end
holds the best one, exactly. Where real-valued risks would leave too many, they are rounded up to a grid: never over budget, the best but for that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from miles.core.memory.actions import Action


@dataclass(frozen=True, kw_only=True)
class Option:
    """What one layer may do. `moment`: bytes of the layer at its own backward; `held`: from its forward until then."""

    action: Action
    seconds: float
    held: int
    moment: int
    risk: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """`layers`: each layer's options, first layer first. `base`: bytes held throughout. `above`: those that end before the last layer's backward."""

    layers: Sequence[Sequence[Option]]
    base: int
    above: int


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """`actions`: by micro-batch, by layer. `seconds`: saved against the slowest of the options, all in all; `risk`: of each micro-batch."""

    actions: list[list[Action]]
    seconds: float
    risk: list[float]


@dataclass(frozen=True)
class _State:
    held: int
    risk: float
    seconds: float
    before: _State | None = None
    option: Option | None = None


def allocate(batches: Sequence[MicroBatch], memory: int, risk: float, *, states: int = 4096, grid: int = 1024) -> Allocation:
    """The best allocation; of equal ones the one with less risk, then fewer bytes, then the option that is named first.

    Args:
        memory: bytes. risk: in the unit of the options'; rounding of their sum is forgiven to one part in 10^12.
        states: choices that are looked at exactly. grid: parts of the risk budget beyond that.
    Raises:
        ValueError: nothing fits into memory.
    """
    front = [_State(0, 0.0, 0.0)]
    limit = risk * (1 + 1e-12)
    for number, batch in enumerate(batches):
        room = memory - batch.base
        for layer, options in enumerate(batch.layers):
            found = [
                _State(state.held + option.held, state.risk + option.risk, state.seconds + option.seconds, state, option)
                for option in options
                for state in front
                if state.held + option.moment <= room and state.risk + option.risk <= limit
            ]
            front = _undominated(found)
            if len(front) > states and risk > 0:
                front = _undominated([up for state in front if (up := _rounded_up(state, risk / grid)).risk <= limit])
            if not front:
                least = min(option.moment for option in options) + batch.base
                raise ValueError(f"layer {layer} of micro-batch {number} needs {least} bytes and more below it, and there are {memory}")
        front = [state for state in front if state.held + batch.above <= room]
        if not front:
            raise ValueError(f"no choice for micro-batch {number} leaves {batch.above} bytes of {memory} for what lies above its layers")
        front = _undominated([_State(0, state.risk, state.seconds, state) for state in front])
    best = max(front, key=lambda state: (state.seconds, -state.risk))
    return Allocation(actions=_actions(best), seconds=best.seconds, risk=_risks(best))


def _undominated(states: list[_State]) -> list[_State]:
    """Those for which no other holds no more, risks no more and saves no less; the first of equal ones."""
    states.sort(key=lambda state: (state.held, state.risk, -state.seconds))
    kept: list[_State] = []
    risks: list[float] = []  # rising, with the seconds beside them, of states that hold no more: a staircase
    seconds: list[float] = []
    for state in states:
        place = bisect_right(risks, state.risk)
        if place and seconds[place - 1] >= state.seconds:
            continue
        kept.append(state)
        start = place - 1 if place and risks[place - 1] == state.risk else place
        stop = place
        while stop < len(risks) and seconds[stop] <= state.seconds:
            stop += 1
        risks[start:stop], seconds[start:stop] = [state.risk], [state.seconds]
    return kept


def _rounded_up(state: _State, step: float) -> _State:
    return _State(state.held, ceil(state.risk / step) * step, state.seconds, state.before, state.option)


def _walk(state: _State) -> list[list[Option]]:
    """Options by micro-batch, the last one first, each from its last layer down."""
    found: list[list[Option]] = []
    while state.before is not None:
        if state.option is None:
            found.append([])
        else:
            found[-1].append(state.option)
        state = state.before
    return found


def _actions(best: _State) -> list[list[Action]]:
    return [[option.action for option in reversed(options)] for options in reversed(_walk(best))]


def _risks(best: _State) -> list[float]:
    return [sum(option.risk for option in reversed(options)) for options in reversed(_walk(best))]
