"""Who computes what: this rank's micro-batches of a batch that every rank knows whole. Pure, so no rank needs to ask another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from miles.data.packing import Packed, balanced_rows, pack
from miles.data.taught import Taught, nothing
from miles.data.types import Sample, Status

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.split_forward.executor import SplitPass


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """One packed row. `indices` are the samples' places in the batch; empty for a dummy row that trains nothing.

    `split`: the pass of a plan that computes it, where common tokens are computed once.
    `taught`: what a teacher says of each sequence, a dummy's too.
    """

    packed: Packed
    indices: tuple[int, ...]
    split: SplitPass | None = None
    taught: tuple[Taught | None, ...] = ()

    def by_sample(self, values_N: Tensor) -> Iterator[tuple[int, Tensor]]:
        """One value a response token of the row -> each sample's place in the batch and its own values. A dummy's are left out."""
        if self.indices:
            yield from zip(self.indices, values_N.split(self.packed.response_length_S.tolist()), strict=True)


def share(
    samples: Sequence[Sample],
    indices: Sequence[int],
    *,
    rank: int,
    world: int,
    max_tokens: int,
    together: int = 1,
    cost: Callable[[Sample], float] = lambda sample: len(sample.tokens),
) -> list[MicroBatch]:
    """This rank's micro-batches of the samples at `indices`, balanced over ranks row by row: see `balanced_rows`.

    Every rank gets the same number, with dummies where it has fewer rows, since FSDP's collectives must pair up. Each `together`
    neighbours of `indices` stay neighbours in one row, as the answers of a pair must. `cost`: what a sample takes to compute, in any unit.
    """
    units = [list(indices[start : start + together]) for start in range(0, len(indices), together)]
    lengths = [sum(len(samples[i].tokens) for i in unit) for unit in units]
    plan = balanced_rows(lengths, [sum(cost(samples[i]) for i in unit) for unit in units], world, max_tokens)
    rows = [[i for place in row for i in units[place]] for row in plan[rank]]
    return [_microbatch(samples, row) if row else _dummy(samples[indices[0]]) for row in rows]


def _microbatch(samples: Sequence[Sample], row: Sequence[int]) -> MicroBatch:
    return MicroBatch(packed=pack([samples[i] for i in row]), indices=tuple(row), taught=tuple(samples[i].taught for i in row))


def _dummy(like: Sample) -> MicroBatch:
    return MicroBatch(packed=pack([DUMMY]), indices=(), taught=(nothing(like.taught),))


DUMMY = Sample(
    sample_id="dummy",
    group_id="dummy",
    tokens=np.zeros(2, np.int64),
    prompt_length=1,
    loss_mask=np.zeros(1, np.bool_),
    logprobs=np.zeros(1, np.float32),
    weight_versions=np.full(1, -1, np.int32),
    status=Status.COMPLETED,
)
