"""The turns of a batch's samples as tensors: where they lie, and where their rewards do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from algorithms.contracts import TurnPlaces
from algorithms.gae import reward_at_the_end
from miles.data.turns import TurnRecord, turns_of
from miles.data.types import Sample


def require_turns(samples: Sequence[Sample], estimator: str, *, states: bool) -> None:
    """Raises ValueError: a sample does not say what its turns are or, with `states`, in which states they began."""
    for sample in samples:
        turns = turns_of(sample)
        if turns is None:
            raise ValueError(
                f"algorithm.advantages = {estimator!r} gives credit by turns, but sample {sample.sample_id} has no metadata['turns'] "
                "(miles/data/turns.py): it is for environments of several turns; use 'grpo' for single answers"
            )
        nameless = [number for number, turn in enumerate(turns) if turn.state is None]
        if states and nameless:
            raise ValueError(f"algorithm.advantages = {estimator!r} compares states, but turn {nameless[0]} of sample {sample.sample_id} has no state")


def token_credit(samples: Sequence[Sample], reward_S: Tensor, mask_N: Tensor, sequence_N: Tensor) -> tuple[Tensor, TurnPlaces | None]:
    """`(reward_N, turns)` of `Rewards`: a turn's own reward lies on its last trained token, or its last one in a sequence that is not trained
    at all; the rest of the sequence's reward on the last trained token of all. Turns are None unless every sample has them."""
    turns = [turns_of(sample) for sample in samples]
    rest_S, own_N = reward_S.clone(), torch.zeros(len(mask_N), dtype=reward_S.dtype)
    starts = np.cumsum([0, *(sample.response_length for sample in samples)])
    for s, (sample, records) in enumerate(zip(samples, turns, strict=True)):
        for turn in records or ():
            rest_S[s] -= turn.reward
            own_N[int(starts[s]) + _last_place(sample, turn)] += turn.reward
    reward_N = own_N + reward_at_the_end(rest_S, mask_N, sequence_N)
    if not samples or any(records is None for records in turns):
        return reward_N, None
    return reward_N, _places([records or [] for records in turns], starts.tolist())


def _last_place(sample: Sample, turn: TurnRecord) -> int:
    trained = np.flatnonzero(sample.loss_mask[turn.start : turn.stop])
    return turn.start + int(trained[-1]) if len(trained) else turn.stop - 1


def _places(turns: Sequence[Sequence[TurnRecord]], starts: Sequence[int]) -> TurnPlaces:
    turn_N = torch.full((starts[-1],), -1, dtype=torch.int64)
    owners = [s for s, records in enumerate(turns) for _ in records]
    flat = [turn for records in turns for turn in records]
    for k, (s, turn) in enumerate(zip(owners, flat, strict=True)):
        turn_N[starts[s] + turn.start : starts[s] + turn.stop] = k
    return TurnPlaces(turn_N=turn_N, sequence_K=torch.tensor(owners, dtype=torch.int64), states=[turn.state for turn in flat])
