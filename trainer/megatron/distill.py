"""A teacher beside the policy: it scores the tokens that were sampled, whole rows at a time over its own pipeline, or an engine has done so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from algorithms.config import AlgorithmConfig
from algorithms.contracts import Counts, LossOutput
from algorithms.distillation.config import DistillConfig
from miles.core.model.load import load_config
from trainer.megatron.architecture import architecture_of
from trainer.megatron.policy import Model
from trainer.megatron.trained import Builder
from trainer.objective import tokens_of
from trainer.rows.distilled import Compared, TaughtLoss
from trainer.rows.meters import Meters
from trainer.rows.row import Row
from trainer.rows.taught import TaughtRow, taught_row


class Distiller(TaughtLoss):
    """Argument `teacher`: None where it runs in an engine.

    Raises:
        ValueError: a divergence over the vocabulary, of which a tensor rank has a part; and as `TaughtLoss`.
    """

    def __init__(self, config: DistillConfig, algorithm: AlgorithmConfig, teacher: Model | None, temperature: float, device: torch.device):
        if config.divergence != "sampled":
            raise ValueError(
                f"distill.divergence = {config.divergence!r} is not there for trainer.backend = 'megatron': use 'sampled', or trainer.backend = 'fsdp'"
            )
        super().__init__(config, algorithm)
        self._teacher, self._temperature, self._device = teacher, temperature, device

    def prepare(self, rows: Sequence[Row]) -> None:
        """Give each row what the teacher thinks of it, on the last stage. Collective."""
        taught = [taught_row(row, self._device) for row in rows]
        scores = [told.logprobs_Q for told in taught if told is not None and told.logprobs_Q is not None]
        if len(scores) < len(rows):
            assert self._teacher is not None, "the driver asks an engine before it calls the trainer"
            scores = self._teacher.score([_read(row, told) for row, told in zip(rows, taught, strict=True)], self._temperature)
        for row, teacher_Q in zip(rows, scores, strict=bool(scores)):
            row.teacher_logprobs_Q = teacher_Q

    def compared(self, row: Row, logprobs_N: Tensor, entropy_N: Tensor | None = None) -> Compared:
        """A row that `prepare` has seen."""
        assert row.teacher_logprobs_Q is not None
        return self.sampled(row, taught_row(row, self._device), row.teacher_logprobs_Q, logprobs_N, entropy_N)

    def of_row(self, row: Row, logprobs_N: Tensor, entropy_N: Tensor | None, *, counts: Counts, meters: Meters, recompute: bool) -> LossOutput:
        """The row's share of the step's loss."""
        compared = self.compared(row, logprobs_N, entropy_N)
        tokens = tokens_of(row, logprobs_N, entropy_N, recompute=recompute)
        meters.mismatch(tokens)
        return self.loss(tokens, compared, counts)


def build_distiller(config: DistillConfig, algorithm: AlgorithmConfig, student: Builder, temperature: float, *, trust_remote_code: bool) -> Distiller:
    """The teacher is loaded in the student's dtype, at its layout. Collective.

    Raises:
        ValueError: the teacher is no model that this backend has, or does not divide into the layout; and as `Distiller`.
    """
    make = partial(Distiller, config, algorithm, temperature=temperature, device=student.device)
    if config.place != "trainer":
        return make(teacher=None)
    hf_config = load_config(config.teacher, trust_remote_code=trust_remote_code)
    architecture = architecture_of(hf_config)
    architecture.check(student.mesh.layout)
    return make(teacher=replace(student, path=config.teacher, hf_config=hf_config, architecture=architecture).frozen())


def _read(row: Row, taught: TaughtRow | None) -> Row:
    return row if taught is None or taught.reading is None else taught.reading
