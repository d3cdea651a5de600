"""The turns of a trajectory: what the policy wrote between two answers of its environment, as a sample carries them in `metadata["turns"]`.

    [{"start": 0, "stop": 4, "reward": 0.0, "state": "door"}, {"start": 9, "stop": 12, "reward": 1.0, "state": "hall"}]

Places are of the response, `stop` excluded. A turn's reward is a part of the sample's: what is left of that after all turns is the last
turn's. `state` names the state in which the turn began, equal for equal states; it may be left out where nobody compares states.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import numpy as np

from miles.data.types import Sample


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """One turn; see the head of this file."""

    start: int
    stop: int
    reward: float = 0.0
    state: Hashable = None


def with_turns(sample: Sample, turns: Sequence[TurnRecord]) -> Sample:
    """`sample` with these turns. Raises ValueError as `turns_of`."""
    changed = replace(sample, metadata=sample.metadata | {"turns": [asdict(turn) for turn in turns]})
    turns_of(changed)
    return changed


def turns_of(sample: Sample) -> list[TurnRecord] | None:
    """The sample's turns in order, or None when it says nothing of them.

    Raises:
        ValueError: what is there are no turns, they overlap or leave the response, a trained token is in none of them, or one of them has
            no trained token although others have. The message names the sample.
    """
    if "turns" not in sample.metadata:
        return None
    try:
        turns = [TurnRecord(**turn) for turn in sample.metadata["turns"]]
    except TypeError as error:
        raise ValueError(f"sample {sample.sample_id}: metadata['turns'] must be a list of start, stop, reward and state, but: {error}") from error
    edges = [0, *(edge for turn in turns for edge in (turn.start, turn.stop)), sample.response_length]
    if any(a > b for a, b in pairwise(edges)) or any(turn.start == turn.stop for turn in turns):
        spans = ", ".join(f"{turn.start}..{turn.stop}" for turn in turns)
        raise ValueError(f"sample {sample.sample_id}: its turns must lie one after another in its {sample.response_length} response tokens, not at {spans}")
    inside = np.zeros(sample.response_length, np.bool_)
    for turn in turns:
        inside[turn.start : turn.stop] = True
    outside = np.flatnonzero(sample.loss_mask & ~inside)
    if len(outside):
        raise ValueError(f"sample {sample.sample_id}: response token {outside[0]} is trained, but belongs to no turn")
    silent = [number for number, turn in enumerate(turns) if not sample.loss_mask[turn.start : turn.stop].any()]
    if silent and sample.loss_mask.any():
        raise ValueError(f"sample {sample.sample_id}: turn {silent[0]} has no trained token: leave it out, and add its reward to the turn before")
    return turns
