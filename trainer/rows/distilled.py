"""The loss beside a teacher, once a row's tokens have been compared: what every trainer backend has in common."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from algorithms import registry
from algorithms.aggregate import aggregate
from algorithms.config import AlgorithmConfig
from algorithms.contracts import Counts, LossOutput, Tokens, masked
from algorithms.distillation.config import DistillConfig
from algorithms.distillation.sampled import sampled_advantages, span_advantages
from trainer.rows.row import Row
from trainer.rows.taught import TaughtRow


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A row's N response tokens under the student, beside the teacher; 0 at places that are not trained.

    Attributes:
        logprobs_N, entropy_N: the student's.
        divergence_N: each token's part of what is reported, and differentiated unless there are advantages.
        advantages_N: what the teacher adds to the rewards' advantages, or None.
        alone_N: bool, trained tokens that no span of the teacher's text covers; None where every one is compared.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None
    divergence_N: Tensor
    advantages_N: Tensor | None = None
    alone_N: Tensor | None = None


class TaughtLoss:
    """Raises ValueError for an option of `algorithm` that has no meaning beside a teacher."""

    def __init__(self, config: DistillConfig, algorithm: AlgorithmConfig):
        _check(algorithm)
        self._config, self._algorithm, self._policy_loss = config, algorithm, registry.loss(algorithm)

    def sampled(self, row: Row, taught: TaughtRow | None, teacher_Q: Tensor, logprobs_N: Tensor, entropy_N: Tensor | None) -> Compared:
        """By the tokens that were sampled, or the spans that write the same text; `teacher_Q`: the teacher's log-probs of what it reads."""
        if taught is None or taught.spans is None:
            advantages_N = masked(sampled_advantages(logprobs_N, teacher_Q), row.mask_N)
            return Compared(logprobs_N=logprobs_N, entropy_N=entropy_N, divergence_N=-advantages_N, advantages_N=advantages_N)
        advantages_N, share_N = span_advantages(logprobs_N, teacher_Q, taught.spans)
        alone_N = row.mask_N & (taught.spans.span_N < 0)
        return Compared(logprobs_N=logprobs_N, entropy_N=entropy_N, divergence_N=-share_N, advantages_N=advantages_N, alone_N=alone_N)

    def loss(self, tokens: Tokens, compared: Compared, counts: Counts) -> LossOutput:
        """A row's share of the step's loss. Sums: the policy loss's, distill/kl, and distill/uncompared where text is compared by spans."""
        advantages_N = self._config.policy_weight * tokens.advantages_N
        if compared.advantages_N is not None:
            advantages_N = advantages_N + compared.advantages_N
        out = self._policy_loss(replace(tokens, advantages_N=advantages_N), counts)
        loss = out.loss
        if compared.advantages_N is None:
            loss = loss + aggregate(compared.divergence_N, tokens, counts, self._algorithm.aggregation)
        sums = {"distill/kl": compared.divergence_N.detach().sum()}
        if compared.alone_N is not None:
            sums["distill/uncompared"] = compared.alone_N.sum()
        return LossOutput(loss=loss, sums=out.sums | sums)


def _check(algorithm: AlgorithmConfig) -> None:
    if algorithm.kl_target is not None:
        raise ValueError(f"algorithm.kl_target = {algorithm.kl_target} does not reach the loss beside a teacher: leave it out, or [distill]")
    if algorithm.entropy_guard != "none":
        raise ValueError(
            f"algorithm.entropy_guard = {algorithm.entropy_guard!r} ranks tokens by the rewards' advantages, which a teacher changes: "
            "set entropy_guard = 'none', or leave [distill] out"
        )
