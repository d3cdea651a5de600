"""The objective that a recipe names, on pairs: losses, and the rewards by which a pair counts as told apart.

The reward of an answer is what the objective itself compares: beta (log pi - log ref) for DPO, IPO and KTO, beta times the mean
log-prob of its tokens for SimPO, that mean for ORPO, and a reward model's output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from algorithms.contracts import LossOutput
from algorithms.preference.bradley_terry import bradley_terry
from algorithms.preference.config import PreferenceConfig, RewardModelConfig
from algorithms.preference.dpo import dpo
from algorithms.preference.ipo import ipo
from algorithms.preference.kto import kto
from algorithms.preference.orpo import orpo
from algorithms.preference.simpo import simpo
from algorithms.ratio import as_float


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """P pairs of a micro-batch; column 0 is the chosen answer, column 1 the rejected one.

    Attributes:
        logprobs_P2: sums over each answer's trained tokens; requires grad. length_P2: int64, their number.
        reference_P2: the same of the reference model, or None without one.
        kl: KTO's point of reference, a scalar of the whole step, or None for other objectives.
    """

    logprobs_P2: Tensor
    length_P2: Tensor
    reference_P2: Tensor | None = None
    kl: Tensor | None = None


def preference_loss(pairs: Pairs, config: PreferenceConfig, total: int) -> LossOutput:
    """Mean over the `total` pairs of the step: micro-batch losses add up. KTO's is the mean over their answers. Sums as `reward_loss`'s."""
    losses, rewards_P2 = _OBJECTIVES[config.objective](pairs, config)
    return _output(losses, rewards_P2, total)


def reward_loss(rewards_P2: Tensor, config: RewardModelConfig, total: int) -> LossOutput:
    """Bradley-Terry on a reward model's outputs, mean over the `total` pairs of the step.

    Sums, over pairs: preference/accuracy, preference/margin, preference/chosen_reward, preference/rejected_reward.
    """
    losses_P = bradley_terry(*rewards_P2.unbind(1), margin_P=config.margin, centre=config.centre)
    return _output(losses_P, rewards_P2, total)


def _output(losses_P: Tensor, rewards_P2: Tensor, total: int) -> LossOutput:
    chosen_P, rejected_P = rewards_P2.detach().unbind(1)
    sums = {
        "preference/accuracy": (chosen_P > rejected_P).sum(),
        "preference/margin": (chosen_P - rejected_P).sum(),
        "preference/chosen_reward": chosen_P.sum(),
        "preference/rejected_reward": rejected_P.sum(),
    }
    return LossOutput(loss=losses_P.sum() / total, sums=sums)


def _dpo(pairs: Pairs, config: PreferenceConfig) -> tuple[Tensor, Tensor]:
    losses_P = dpo(*_four(pairs), beta=config.scale, label_smoothing=config.label_smoothing)
    return losses_P, config.scale * _moved(pairs)


def _ipo(pairs: Pairs, config: PreferenceConfig) -> tuple[Tensor, Tensor]:
    return ipo(*_four(pairs), beta=config.scale), config.scale * _moved(pairs)


def _kto(pairs: Pairs, config: PreferenceConfig) -> tuple[Tensor, Tensor]:
    assert pairs.reference_P2 is not None
    assert pairs.kl is not None
    good_2 = torch.tensor([True, False], device=pairs.logprobs_P2.device)
    losses_P2 = kto(pairs.logprobs_P2, pairs.reference_P2, good_2, pairs.kl, beta=config.scale, good_weight=config.good_weight, bad_weight=config.bad_weight)
    return losses_P2.mean(1), config.scale * _moved(pairs)


def _orpo(pairs: Pairs, config: PreferenceConfig) -> tuple[Tensor, Tensor]:
    return orpo(*_mean(pairs).unbind(1), weight=config.odds_weight), _mean(pairs)


def _simpo(pairs: Pairs, config: PreferenceConfig) -> tuple[Tensor, Tensor]:
    return simpo(*_mean(pairs).unbind(1), beta=config.scale, gamma=config.gamma), config.scale * _mean(pairs)


_OBJECTIVES = {"dpo": _dpo, "ipo": _ipo, "kto": _kto, "orpo": _orpo, "simpo": _simpo}


def _four(pairs: Pairs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert pairs.reference_P2 is not None
    chosen_P, rejected_P = pairs.logprobs_P2.unbind(1)
    reference_chosen_P, reference_rejected_P = pairs.reference_P2.unbind(1)
    return chosen_P, rejected_P, reference_chosen_P, reference_rejected_P


def _moved(pairs: Pairs) -> Tensor:
    assert pairs.reference_P2 is not None
    return as_float(pairs.logprobs_P2) - as_float(pairs.reference_P2)


def _mean(pairs: Pairs) -> Tensor:
    return as_float(pairs.logprobs_P2) / pairs.length_P2
