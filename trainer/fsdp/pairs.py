"""The loss on pairs of answers, one row at a time: by the policy's log-probs of whole answers, or by a reward model's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from algorithms.contracts import LossOutput, masked
from algorithms.preference.config import PairConfig, PreferenceConfig, RewardModelConfig
from algorithms.preference.objective import Pairs, preference_loss, reward_loss
from miles.core.model.reward import packed_rewards
from miles.data.types import Sample
from trainer.fsdp.scoring import Scorer
from trainer.rows.row import Row


@dataclass(kw_only=True, eq=False)
class PairLoss:
    """Rows hold chosen and rejected answers in turn; a dummy row, of one sequence, holds no pair.

    `reference` is there where the objective needs it; `kl` is of the step that is being taken, for KTO.
    """

    config: PairConfig
    model: PreTrainedModel
    policy: Scorer
    reference: Scorer | None
    kl: Tensor | None = None

    def begin(self, rows: Sequence[Row], strangers: Sequence[Row], world: int) -> dict[str, float]:
        """Everything of a step that is scored before its first backward: the reference's log-probs, and KTO's KL by `strangers`, rows
        of `mismatched` answers. Returns what there is to report. Collective."""
        if self.reference is None:
            return {}
        for row in rows:
            row.reference_logprobs_N = self.reference.score(row, 1.0)
        if not strangers:
            return {}
        total = torch.zeros(2, dtype=torch.float64, device=rows[0].tokens_T.device)  # log-ratios, and answers with any token
        for row in strangers:
            moved_N = self.policy.score(row, 1.0).double() - self.reference.score(row, 1.0).double()
            total += torch.stack((masked(moved_N, row.mask_N).sum(), (row.sequence_length_S > 0).sum()))
        if world > 1:
            dist.all_reduce(total)
        self.kl = total[0] / total[1]
        return {"preference/kl": float(self.kl)}

    def __call__(self, row: Row, total: int) -> LossOutput:
        """The row's share of the step's mean over `total` pairs."""
        if isinstance(self.config, RewardModelConfig):
            rewards_S = packed_rewards(self.model, row.tokens_T, row.positions_T, row.sequence_T)
            return reward_loss(_paired(rewards_S), self.config, total)
        return self.policy.loss(row, partial(self._of_answers, self.config, total), 1.0, together=2)

    def _of_answers(self, config: PreferenceConfig, total: int, row: Row, logprobs_N: Tensor, _: Tensor | None) -> LossOutput:
        reference_N = row.reference_logprobs_N
        pairs = Pairs(
            logprobs_P2=_paired(_answer_sums(logprobs_N, row)),
            length_P2=_paired(row.sequence_length_S),
            reference_P2=None if reference_N is None else _paired(_answer_sums(reference_N, row)),
            kl=self.kl,
        )
        return preference_loss(pairs, config, total)


def mismatched(samples: Sequence[Sample]) -> list[Sample]:
    """Each prompt with the same-sided answer of the next pair, cut to the longest sequence there is: what KTO estimates its KL on."""
    longest = max(len(s.tokens) for s in samples)
    strangers = []
    for prompt, answer in zip(samples, [*samples[2:], *samples[:2]], strict=True):
        tokens = np.concatenate([prompt.tokens[: prompt.prompt_length], answer.response_tokens])[:longest]
        length = len(tokens) - prompt.prompt_length
        parts = {name: getattr(answer, name)[:length] for name in ("loss_mask", "logprobs", "weight_versions")}
        strangers.append(replace(answer, tokens=tokens, prompt_length=prompt.prompt_length, **parts))
    return strangers


def _answer_sums(values_N: Tensor, row: Row) -> Tensor:
    """Sums over the trained tokens of each sequence, [S]."""
    return values_N.new_zeros(row.num_sequences).index_add(0, row.sequence_N, masked(values_N, row.mask_N))


def _paired(values_S: Tensor) -> Tensor:
    """[P, 2], with the graph of `values_S` also where there is no pair: a dummy row's backward must run."""
    return values_S[: len(values_S) // 2 * 2].view(-1, 2)
