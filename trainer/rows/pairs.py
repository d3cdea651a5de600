"""Pairs of answers in packed rows, chosen and rejected ones in turn: the loss on their log-probs, and what KTO measures beforehand.

A dummy row, of one sequence, holds no pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from algorithms.contracts import LossOutput, masked
from algorithms.preference.config import PreferenceConfig, RewardModelConfig
from algorithms.preference.objective import Pairs, preference_loss, reward_loss
from miles.data.types import Sample
from trainer.rows.row import Row


def loss_of_answers(row: Row, logprobs_N: Tensor, _: Tensor | None, *, config: PreferenceConfig, total: int, kl: Tensor | None) -> LossOutput:
    """The row's share of a step's mean over `total` pairs. `kl`: of the step, for KTO."""
    reference_N = row.reference_logprobs_N
    pairs = Pairs(
        logprobs_P2=paired(_answer_sums(logprobs_N, row)),
        length_P2=paired(row.sequence_length_S),
        reference_P2=None if reference_N is None else paired(_answer_sums(reference_N, row)),
        kl=kl,
    )
    return preference_loss(pairs, config, total)


def loss_of_rewards(row: Row, rewards_S: Tensor, _: Tensor | None = None, *, config: RewardModelConfig, total: int) -> LossOutput:
    """The same of a reward model, which says one number for each sequence."""
    return reward_loss(paired(rewards_S), config, total)


def moved_away(row: Row, policy_N: Tensor, reference_N: Tensor) -> Tensor:
    """Sums over a row for KTO's KL, float64 [2]: log-ratios of the trained tokens, and answers with any."""
    return torch.stack((masked(policy_N.double() - reference_N.double(), row.mask_N).sum(), (row.sequence_length_S > 0).sum().double()))


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


def paired(values_S: Tensor) -> Tensor:
    """[P, 2], with the graph of `values_S` also where there is no pair: a dummy row's backward must run."""
    return values_S[: len(values_S) // 2 * 2].view(-1, 2)
