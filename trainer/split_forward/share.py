"""A rank's micro-batches where common tokens are computed once: the counterpart of `trainer.rows.share` for `trainer.prompt_sharing`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from miles.core.planning.hardware import hardware_of
from miles.core.planning.plan import Plan
from miles.core.planning.workload import workload_of
from miles.data.packing import pack
from miles.data.types import Sample
from trainer.rows.share import DUMMY, MicroBatch
from trainer.split_forward.executor import Split, SplitPass
from trainer.split_forward.planner import THRESHOLDS, Batch, plan


@dataclass
class PromptSharing:
    """Plans for one model on one rank.

    Args:
        capacity: tokens whose graph exists at one moment, shared ones included. compute_dtype, thresholds: as in
            `workload_of` and `planner.plan`.
    Attributes:
        tokens, computed: of all plans since they were last read by `metrics`, over all ranks. ahead: of those that were computed before
            there were answers.
    """

    model: PreTrainedModel
    rank: int
    world: int
    capacity: int
    threads: int
    device: torch.device
    compute_dtype: torch.dtype | None = None
    thresholds: Sequence[int] = THRESHOLDS
    tokens: int = 0
    computed: int = 0
    ahead: int = 0

    def __post_init__(self) -> None:
        self.workload, self.hardware = workload_of(self.model, self.compute_dtype), hardware_of(self.device.type, self.threads)

    def share(self, samples: Sequence[Sample], indices: Sequence[int], together: int = 1) -> list[MicroBatch]:
        """As `trainer.rows.share.share`. The micro-batches belong together: they are to be run in order, all of them."""
        lengths = [s.prompt_length for s in samples]
        batch = Batch(tokens=[s.tokens for s in samples], prompt_lengths=lengths, places=indices, together=together)
        plans = plan(batch, self.workload, self.hardware, world=self.world, capacity=self.capacity, thresholds=self.thresholds)
        self.count(plans)
        split = Split(plans[self.rank], batch.tokens, lengths, self.device)
        micros: list[MicroBatch] = []
        for number in split.replays:
            places = split.plan.passes[number].samples
            packed = pack([samples[i] for i in places] or [DUMMY])
            micros.append(MicroBatch(packed=packed, indices=places, split=SplitPass(split=split, number=number, first=not micros)))
        return micros

    def count(self, plans: Sequence[Plan]) -> None:
        """Count the work of one batch on all ranks."""
        self.tokens += sum(p.tokens for p in plans)
        self.computed += sum(p.computed for p in plans)

    def metrics(self) -> dict[str, float]:
        found = {"sharing/computed": self.computed / max(self.tokens, 1)}
        if self.ahead:
            found["sharing/ahead"] = self.ahead / max(self.computed, 1)
        self.tokens = self.computed = self.ahead = 0
        return found
