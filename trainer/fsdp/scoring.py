"""Packed rows as tensors on the device, and their log-probs by a model: with a graph to train, or without to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from miles.core.model.packed import packed_logprobs
from trainer.fsdp.model import reshard
from trainer.fsdp.share import MicroBatch
from trainer.split_forward.executor import Executor, SplitPass


@dataclass(kw_only=True, eq=False)
class Row:
    """One micro-batch on the device: T tokens, N response tokens, S sequences. Shapes as in `Packed` and `Tokens`.

    `start_logprobs_N` and `reference_logprobs_N` are filled in when the objective needs them, `values_N` (at the step's start) and
    `returns_N` (NaN where there is nothing to learn) when there is a critic.
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
    start_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None
    values_N: Tensor | None = None
    returns_N: Tensor | None = None
    split: SplitPass | None = None


def own_part(micro: MicroBatch, values: Sequence[Tensor] | None, device: torch.device) -> Tensor:
    """A row's own part [N] of `values` ([R] of each sample of a batch); zeros for a dummy row, and without values."""
    if values is None or not micro.indices:
        return torch.zeros(len(micro.packed.sequence_N), device=device)
    return torch.cat([values[i] for i in micro.indices]).to(device)


class Scorer:
    """A model, policy or reference, that scores rows."""

    def __init__(self, model: PreTrainedModel, chunk: int, device: torch.device):
        self._model, self._chunk, self._device = model, chunk, device
        self._walk: Executor | None = None

    def row(self, micro: MicroBatch, advantages: Sequence[Tensor] | None = None) -> Row:
        """`micro` on the device. `advantages`: [R] of each sample of the whole batch; None where nothing of the kind is needed."""
        packed = micro.packed
        trained_S = np.bincount(packed.sequence_N[packed.loss_mask_N], minlength=packed.num_sequences)
        return Row(
            tokens_T=self._moved(packed.tokens_T),
            positions_T=self._moved(packed.positions_T),
            sequence_T=self._moved(packed.sequence_T),
            scored_N=self._moved(packed.target_index_N + 1),
            mask_N=self._moved(packed.loss_mask_N),
            rollout_logprobs_N=self._moved(packed.rollout_logprobs_N),
            advantages_N=own_part(micro, advantages, self._device),
            sequence_N=self._moved(packed.sequence_N),
            num_sequences=packed.num_sequences,
            sequence_length_S=self._moved(trained_S),
            split=micro.split,
        )

    def _moved(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def forward(self, row: Row, temperature: float, entropy: bool, entropy_gradient: bool = False) -> tuple[Tensor, Tensor | None]:
        """`(logprobs_N, entropy_N or None)` with their graph, the entropy's only with `entropy_gradient`. Collective."""
        if row.split is not None:
            return self._walk_to(row.split).replay(row.split.number, temperature, entropy, entropy_gradient)
        where = row.tokens_T, row.positions_T, row.sequence_T, row.scored_N
        return packed_logprobs(self._model, *where, temperature, self._chunk, entropy, entropy_gradient)

    def settle(self, row: Row) -> None:
        """To be called after the backward of each row in turn: what rows had in common is differentiated once all of them have been. Collective."""
        if row.split is not None:
            assert self._walk is not None, "a row is settled that was never computed"
            self._walk.settle()

    def _walk_to(self, one: SplitPass) -> Executor:
        if one.first:
            self._walk = Executor(self._model, one.split, self._chunk)
        assert self._walk is not None, "rows of a plan are computed in its order"
        return self._walk

    def score(self, row: Row, temperature: float) -> Tensor:
        """`logprobs_N` without a graph. Collective."""
        with torch.no_grad():
            logprobs_N, _ = self.forward(row, temperature, False)
            self.settle(row)
        reshard(self._model)
        return logprobs_N
