"""One micro-batch as tensors on the device, and a part of it as a loss reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.contracts import LossOutput
from miles.data.taught import Taught
from trainer.rows.share import MicroBatch

if TYPE_CHECKING:
    from trainer.split_forward.executor import SplitPass


@dataclass(kw_only=True, eq=False)
class Row:
    """One micro-batch on the device: T tokens, N response tokens, S sequences. Shapes as in `Packed` and `Tokens`.

    `response_length_S` lies on the host. `start_logprobs_N` and `reference_logprobs_N` are filled in when the objective needs them, `values_N`
    (at the step's start) and `returns_N` (NaN where there is nothing to learn) when there is a critic, `teacher_logprobs_Q` of the Q tokens that
    a teacher reads.
    """

    tokens_T: Tensor
    positions_T: Tensor
    sequence_T: Tensor
    scored_N: Tensor
    mask_N: Tensor
    rollout_logprobs_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    num_sequences: int
    sequence_length_S: Tensor
    response_length_S: tuple[int, ...]
    first_T: Tensor | None = None
    start_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None
    values_N: Tensor | None = None
    returns_N: Tensor | None = None
    teacher_logprobs_Q: Tensor | None = None
    split: SplitPass | None = None
    taught: tuple[Taught | None, ...] = ()

    def part(self, tokens: slice, sequences: slice) -> Row:
        """What a loss reads, of these response tokens alone, which lie in these sequences; `tokens_T` and its like stay whole."""
        cut: dict[str, Any] = {"num_sequences": sequences.stop - sequences.start}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and field.name.endswith(("_N", "_S")):
                cut[field.name] = value[tokens if field.name.endswith("_N") else sequences]
        cut["sequence_N"] = cut["sequence_N"] - sequences.start
        return replace(self, **cut)


RowLoss = Callable[[Row, Tensor, Tensor | None], LossOutput]
"""`(row or a part of one, log-probs, entropies or None)` -> their share of the step's loss."""


def own_part(micro: MicroBatch, values: Sequence[Tensor] | None, device: torch.device) -> Tensor:
    """A row's own part [N] of `values` ([R] of each sample of a batch); zeros for a dummy row, and without values."""
    if values is None or not micro.indices:
        return torch.zeros(len(micro.packed.sequence_N), device=device)
    return torch.cat([values[i] for i in micro.indices]).to(device)


def row_of(micro: MicroBatch, advantages: Sequence[Tensor] | None, device: torch.device) -> Row:
    """`micro` on the device. `advantages`: [R] of each sample of the whole batch; None where nothing of the kind is needed."""

    def moved(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    packed = micro.packed
    trained_S = np.bincount(packed.sequence_N[packed.loss_mask_N], minlength=packed.num_sequences)
    return Row(
        tokens_T=moved(packed.tokens_T),
        positions_T=moved(packed.positions_T),
        sequence_T=moved(packed.sequence_T),
        first_T=None if packed.first_T is None else moved(packed.first_T),
        scored_N=moved(packed.target_index_N + 1),
        mask_N=moved(packed.loss_mask_N),
        rollout_logprobs_N=moved(packed.rollout_logprobs_N),
        advantages_N=own_part(micro, advantages, device),
        sequence_N=moved(packed.sequence_N),
        num_sequences=packed.num_sequences,
        sequence_length_S=moved(trained_S),
        split=micro.split,
        taught=micro.taught,
        response_length_S=tuple(packed.response_length_S.tolist()),
    )
