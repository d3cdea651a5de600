"""Distillation: what a frozen teacher makes of the student's tokens, and the loss that pulls the student towards it.

    sampled                     the teacher scores the sampled tokens; log teacher - log student joins their advantages in the policy loss
    forward, reverse, jensen    loss = divergence over the whole vocabulary + policy loss

The policy loss is that of `[algorithm]`, with the rewards' advantages times `policy_weight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear as plain_linear
from transformers import PreTrainedModel

from algorithms import registry
from algorithms.aggregate import aggregate
from algorithms.config import AlgorithmConfig
from algorithms.contracts import Counts, LossOutput, Tokens, masked
from algorithms.distillation.config import DistillConfig
from algorithms.distillation.full import full_divergence
from algorithms.distillation.sampled import sampled_advantages
from miles.core.model.compare import compare
from miles.core.model.packed import output_head, through_head
from miles.core.model.scoring import score
from trainer.fsdp.model import reshard
from trainer.fsdp.scoring import Row, Scorer

Scores = tuple[Tensor, Tensor | None, Tensor]
"""The student's log-probs [N] and entropies [N], and the divergence from the teacher [N], 0 at places that are not trained."""


class Distiller:
    """The teacher beside the student, both seen one row at a time.

    Args:
        student, teacher: models from `build_model`; the teacher is never trained.
        temperature: at which both are compared, the sampling temperature.
        dtype: in which both compute.
    """

    def __init__(
        self,
        config: DistillConfig,
        algorithm: AlgorithmConfig,
        *,
        student: PreTrainedModel,
        teacher: PreTrainedModel,
        temperature: float,
        chunk: int,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self._config, self._algorithm, self._policy_loss = config, algorithm, registry.loss(algorithm)
        self._student, self._teacher = student, teacher
        self._student_scorer, self._teacher_scorer = Scorer(student, chunk, device), Scorer(teacher, chunk, device)
        self._temperature, self._chunk = temperature, chunk
        self._policy_learns = config.divergence == "sampled" or config.policy_weight > 0 or algorithm.kl_coef > 0 or algorithm.entropy_coef != 0
        # The student's head needs it whole, at a moment when the teacher's own hooks do not run.
        weight = output_head(teacher).weight.detach()
        self._teacher_head_VE = (weight.full_tensor() if isinstance(weight, DTensor) else weight).to(dtype)

    def forward(self, row: Row) -> Scores:
        """With the student's graph. Collective."""
        entropy_gradient = self._algorithm.entropy_coef != 0
        if self._config.divergence != "sampled":
            return self._over_vocabulary(row, entropy_gradient)
        teacher_N = self._teacher_scorer.score(row, self._temperature)
        logprobs_N, entropy_N = self._student_scorer.forward(row, self._temperature, True, entropy_gradient)
        return logprobs_N, entropy_N, masked(-sampled_advantages(logprobs_N, teacher_N), row.mask_N)

    def loss(self, tokens: Tokens, divergence_N: Tensor, counts: Counts) -> LossOutput:
        """A row's share of the step's loss. Sums: the policy loss's, and distill/kl."""
        advantages_N = self._config.policy_weight * tokens.advantages_N
        sampled = self._config.divergence == "sampled"
        if sampled:
            advantages_N = advantages_N - divergence_N
        out = self._policy_loss(replace(tokens, advantages_N=advantages_N), counts)
        loss = out.loss if sampled else out.loss + aggregate(divergence_N, tokens, counts, self._algorithm.aggregation)
        return LossOutput(loss=loss, sums=out.sums | {"distill/kl": divergence_N.detach().sum()})

    def total(self, rows: Sequence[Row]) -> Tensor:
        """The divergence summed over the trained tokens of `rows`, a float64 scalar without a graph. Collective."""
        with torch.no_grad():
            total = sum((self.forward(row)[2].double().sum() for row in rows), torch.zeros((), dtype=torch.float64, device=self._teacher_head_VE.device))
        reshard(self._student)
        return total

    def _over_vocabulary(self, row: Row, entropy_gradient: bool) -> Scores:
        """Only the trained tokens are compared: others cost no logits, and nothing of theirs can reach the loss."""
        where = row.tokens_T, row.positions_T, row.sequence_T
        trained_M = row.mask_N.nonzero().squeeze(1)
        with torch.no_grad():
            teacher_ME = through_head(self._teacher, *where, row.scored_N[trained_M] - 1, lambda hidden_ME, _: hidden_ME.clone())
        reshard(self._teacher)
        targets_N = row.tokens_T[row.scored_N]
        linear = getattr(self._student, "batch_invariant_linear", plain_linear)

        def scored(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
            with torch.set_grad_enabled(torch.is_grad_enabled() and self._policy_learns):
                policy = score(hidden_ND, weight_VD, targets_N, self._temperature, self._chunk, True, linear, entropy_gradient)
            compared_M = compare(hidden_ND[trained_M], weight_VD, teacher_ME, self._teacher_head_VE, self._measure, self._temperature, self._chunk)
            divergence_N = compared_M.new_zeros(len(hidden_ND)).index_put((trained_M,), compared_M)
            assert policy[1] is not None
            return torch.stack((policy[0], policy[1], divergence_N))

        logprobs_N, entropy_N, divergence_N = through_head(self._student, *where, row.scored_N - 1, scored)
        return logprobs_N, entropy_N if entropy_gradient else entropy_N.detach(), divergence_N

    def _measure(self, student_CV: Tensor, teacher_CV: Tensor) -> Tensor:
        kind = self._config.divergence
        assert kind != "sampled"
        return full_divergence(student_CV, teacher_CV, kind, self._config.beta)
