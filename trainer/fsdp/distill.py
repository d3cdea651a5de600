"""Distillation: what a frozen teacher makes of the student's tokens, and the loss that pulls the student towards it.

    sampled                     the teacher scores the sampled tokens; log teacher - log student joins their advantages in the policy loss
    forward, reverse, jensen    loss = divergence + policy loss: over the whole vocabulary with a teacher beside the student, over its
                                likeliest tokens and one outcome for all others with one in an engine

The policy loss is that of `[algorithm]`, with the rewards' advantages times `policy_weight`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear as plain_linear
from transformers import PreTrainedModel

from algorithms.config import AlgorithmConfig
from algorithms.distillation.config import DistillConfig
from algorithms.distillation.full import full_divergence
from algorithms.distillation.top_k import top_k_divergence
from miles.core.model.compare import Measure, compare
from miles.core.model.config import ModelConfig
from miles.core.model.packed import output_head, through_head
from miles.core.model.scoring import scaled_logits, score
from miles.core.model.sharded import gathered, reshard
from trainer.fsdp.mesh import Mesh
from trainer.fsdp.model import build_model, compute_dtype_of
from trainer.fsdp.scoring import Scorer
from trainer.rows.distilled import Compared, TaughtLoss
from trainer.rows.row import Row
from trainer.rows.taught import TaughtRow, taught_row


class Distiller(TaughtLoss):
    """The student beside its teacher, one row at a time.

    Args:
        student, teacher: models from `build_model`; the teacher is never trained, and None where it runs in an engine.
        temperature: at which both are compared, the sampling temperature.
        dtype: in which both compute.
    Raises:
        ValueError: an option of `algorithm` that has no meaning beside a teacher.
    """

    def __init__(
        self,
        config: DistillConfig,
        algorithm: AlgorithmConfig,
        *,
        student: PreTrainedModel,
        teacher: PreTrainedModel | None,
        temperature: float,
        chunk: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__(config, algorithm)
        self._student, self._teacher = student, teacher
        self._student_scorer = Scorer(student, chunk, device)
        self._teacher_scorer = None if teacher is None else Scorer(teacher, chunk, device)
        self._temperature, self._chunk, self._device = temperature, chunk, device
        self._policy_learns = config.divergence == "sampled" or config.policy_weight > 0 or algorithm.kl_coef > 0 or algorithm.entropy_coef != 0
        if teacher is not None:
            # The student's head needs it whole, at a moment when the teacher's own hooks do not run.
            self._teacher_head_VE = gathered(output_head(teacher).weight).to(dtype)

    def forward(self, row: Row) -> Compared:
        """With the student's graph. Collective."""
        taught = taught_row(row, self._device)
        return self._sampled(row, taught) if self._config.divergence == "sampled" else self._over_vocabulary(row, taught)

    def total(self, rows: Sequence[Row]) -> Tensor:
        """The divergence summed over the trained tokens of `rows`, a float64 scalar without a graph. Collective."""
        with torch.no_grad():
            total = sum((self.forward(row).divergence_N.double().sum() for row in rows), torch.zeros((), dtype=torch.float64, device=self._device))
        reshard(self._student)
        return total

    def _sampled(self, row: Row, taught: TaughtRow | None) -> Compared:
        teacher_Q = None if taught is None else taught.logprobs_Q
        if teacher_Q is None:
            assert self._teacher_scorer is not None, "the driver asks an engine before it calls the trainer"
            reading = row if taught is None or taught.reading is None else taught.reading
            teacher_Q = self._teacher_scorer.score(reading, self._temperature)
        logprobs_N, entropy_N = self._student_scorer.forward(row, self._temperature, True, self._algorithm.entropy_coef != 0)
        return self.sampled(row, taught, teacher_Q, logprobs_N, entropy_N)

    def _over_vocabulary(self, row: Row, taught: TaughtRow | None) -> Compared:
        """Only the trained tokens are compared: others cost no logits, and nothing of theirs can reach the loss."""
        trained_M, targets_N = row.mask_N.nonzero().squeeze(1), row.tokens_T[row.scored_N]
        measure, beside_M = self._beside(row, taught, trained_M)
        linear = getattr(self._student, "batch_invariant_linear", plain_linear)
        entropy_gradient = self._algorithm.entropy_coef != 0

        def scored(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
            with torch.set_grad_enabled(torch.is_grad_enabled() and self._policy_learns):
                policy = score(hidden_ND, weight_VD, targets_N, self._temperature, self._chunk, True, linear, entropy_gradient)
            compared_M = compare(hidden_ND[trained_M], weight_VD, measure, beside_M, self._temperature, self._chunk)
            divergence_N = compared_M.new_zeros(len(hidden_ND)).index_put((trained_M,), compared_M)
            assert policy[1] is not None
            return torch.stack((policy[0], policy[1], divergence_N))

        where = row.tokens_T, row.positions_T, row.sequence_T
        logprobs_N, entropy_N, divergence_N = through_head(self._student, *where, row.scored_N - 1, scored, row.first_T)
        return Compared(logprobs_N=logprobs_N, entropy_N=entropy_N if entropy_gradient else entropy_N.detach(), divergence_N=divergence_N)

    def _beside(self, row: Row, taught: TaughtRow | None, trained_M: Tensor) -> tuple[Measure, list[Tensor]]:
        """How the student's logits are measured, and what of the teacher stands beside each trained token for it."""
        kind, beta = self._config.divergence, self._config.beta
        assert kind != "sampled"
        if self._teacher is None:
            assert taught is not None, "the driver asks an engine before it calls the trainer"
            assert taught.top_ids_NK is not None
            assert taught.top_logprobs_NK is not None
            top = [taught.top_ids_NK[trained_M], taught.top_logprobs_NK[trained_M]]
            return lambda student_CV, ids_CK, told_CK: top_k_divergence(student_CV, ids_CK, told_CK, kind, beta), top
        with torch.no_grad():
            where = row.tokens_T, row.positions_T, row.sequence_T, row.scored_N[trained_M] - 1
            teacher_ME = through_head(self._teacher, *where, lambda hidden_ME, _: hidden_ME.clone(), row.first_T)
        reshard(self._teacher)

        def measure(student_CV: Tensor, teacher_CE: Tensor) -> Tensor:
            return full_divergence(student_CV, scaled_logits(teacher_CE, self._teacher_head_VE, self._temperature, plain_linear), kind, beta)

        return measure, [teacher_ME]


def build_distiller(
    config: DistillConfig,
    algorithm: AlgorithmConfig,
    model: ModelConfig,
    *,
    student: PreTrainedModel,
    temperature: float,
    chunk: int,
    master_dtype: torch.dtype,
    mesh: Mesh,
    device: torch.device,
) -> Distiller:
    """`model` is the student's section; a teacher in the trainer is loaded with its dtype. Collective."""
    teacher_model = model.model_copy(update={"path": config.teacher, "true_on_policy": False})
    teacher = None
    if config.place == "trainer":
        teacher = build_model(teacher_model, master_dtype=master_dtype, mesh=mesh, device=device).requires_grad_(False)
    return Distiller(
        config,
        algorithm,
        student=student,
        teacher=teacher,
        temperature=temperature,
        chunk=chunk,
        device=device,
        dtype=compute_dtype_of(teacher_model, master_dtype),
    )
