"""The `[algorithm]` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from miles.config import Section

TURN_CREDIT = ("gigpo", "turn_grpo")
"""Estimators that need to know the turns of a trajectory."""

GROUP_RELATIVE = ("grpo", "rloo", "reinforce_pp_baseline", "gdpo", *TURN_CREDIT)
"""Estimators whose baseline is the group: a group of one learns nothing."""

_READ_BY = {"gamma": ("gae", "gigpo", "turn_grpo"), "gae_lambda": ("gae",), "whiten": ("gae",), "turn_weight": ("gigpo",)}
"""Options that one or few estimators read."""


class AlgorithmConfig(Section):
    """The objective: how rewards become advantages, and advantages a loss."""

    advantages: str = Field("grpo", description="advantage estimator by name, or a function of yours as module:function")
    scale: Literal["std", "none", "mean_abs"] = Field("std", description="what group-centred rewards are divided by; none is Dr.GRPO")
    part_weights: dict[str, float] = Field(
        default_factory=dict, description="gdpo: the weight of each reward function's own advantage, by its name; 1 where it is not named"
    )
    gamma: float = Field(
        1.0, gt=0, le=1, description="discount of later rewards: by trained tokens (gae), or by turns (gigpo, turn_grpo; 0.95 in GiGPO's paper)"
    )
    gae_lambda: float = Field(
        0.95, ge=0, le=1, description="gae: share of each later error that a token is credited with: 0 trusts the critic, 1 the rewards alone"
    )
    whiten: bool = Field(True, description="gae: advantages less their mean, over their standard deviation, over the trained tokens of the batch")
    turn_weight: float = Field(1.0, ge=0, description="gigpo: weight of a turn's own advantage beside that of the whole trajectory (omega)")
    loss: str = Field("ppo_clip", description="policy loss by name, or a function of yours as module:function")
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_constant"] = Field(
        "token_mean", description="token_mean is DAPO, sequence_mean is GRPO's paper, sequence_sum_constant is Dr.GRPO"
    )
    clip_low: float = Field(0.2, ge=0, description="ratios below 1 - clip_low are clipped")
    clip_high: float = Field(0.28, ge=0, description="ratios above 1 + clip_high are clipped (DAPO's clip-higher)")
    clip_dual: float | None = Field(
        None, gt=1, description="with a negative advantage the ratio counts at most this much (dual clip, usually 3); null: no bound"
    )
    gate_positive: float = Field(1.0, gt=0, description="sapo: temperature of the gate where the advantage is positive")
    gate_negative: float = Field(1.05, gt=0, description="sapo: temperature of the gate where the advantage is negative")
    old_logprobs: Literal["rollout", "recompute"] = Field(
        "rollout", description="the ratio's denominator: the engine's record, or the trainer's own scores at the step's start"
    )
    correction: Literal["none", "importance", "truncate", "clip", "mask"] = Field(
        "none",
        description="weight of the loss by trainer over engine probability, for engines that compute a little differently or lag: as it is "
        "(decoupled PPO), cut at correction_high (TIS), clipped between both bounds, or 0 outside of them (IcePop); needs old_logprobs = 'recompute'",
    )
    correction_level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="that probability ratio of each token, of the whole sequence, or its geometric mean over the sequence"
    )
    correction_low: float = Field(0.5, ge=0, description="lower bound of clip and mask")
    correction_high: float = Field(2.0, gt=0, description="upper bound of truncate, clip and mask")
    sequence_mask: float | None = Field(
        None,
        gt=0,
        description="a sequence with a negative advantage whose mean log(old / policy) is above this is not trained (off-policy sequence masking)",
    )
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference model in the loss; above 0 loads a reference")
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="reward: a sample's reward less kl_coef times its log(engine / reference), summed over its tokens, before advantages; "
        "a group whose rewards agree differs by its KL alone, which scale = 'std' would blow up: set scale = 'none' beside it",
    )
    kl_target: float | None = Field(
        None, gt=0, description="KL to the reference, nats per token, that kl_coef is steered to, a little each step; null: kl_coef stays as it is"
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3_clipped"] = Field(
        "k3", description="estimator that is reported (in the reward the KL is k1's); the loss has the KL's own gradient with any of them"
    )
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    entropy_guard: Literal["none", "clip_cov", "kl_cov"] = Field(
        "none",
        description="what is done with the tokens whose log-prob and advantage vary together most, which drive the entropy down: "
        "they are not trained (clip_cov), or penalised for leaving the old policy (kl_cov)",
    )
    guard_share: float = Field(0.002, gt=0, lt=1, description="entropy_guard: those tokens' share of a step")
    guard_coef: float = Field(1.0, ge=0, description="kl_cov: weight of the penalty")
    dynamic_sampling: bool = Field(False, description="drop groups whose rewards are all equal and sample others (DAPO)")
    max_sampling_rounds: int = Field(
        8, ge=1, description="with dynamic_sampling: how many times the batch may be refilled before the run stops with a diagnosis"
    )

    @model_validator(mode="after")
    def _consistent(self) -> AlgorithmConfig:
        for option, readers in _READ_BY.items():
            value = getattr(self, option)
            if value != AlgorithmConfig.model_fields[option].default and ":" not in self.advantages and self.advantages not in readers:
                raise ValueError(
                    f"algorithm.{option} = {value} is for algorithm.advantages = {' or '.join(map(repr, readers))}, "
                    f"and {self.advantages!r} does not read it: leave it out"
                )
        if self.correction != "none" and self.old_logprobs == "rollout":
            raise ValueError(
                f"algorithm.correction = {self.correction!r} compares the trainer's own log-probs with the engine's, "
                "but old_logprobs = 'rollout' takes the engine's for both: set algorithm.old_logprobs = 'recompute'"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError(f"algorithm.kl_target = {self.kl_target} steers kl_coef, which is 0: set algorithm.kl_coef to begin with, for example 0.1")
        if self.kl_in == "reward" and self.advantages == "gdpo":
            raise ValueError(
                "algorithm.kl_in = 'reward' changes the total reward, but advantages = 'gdpo' reads the reward functions one by one: use kl_in = 'loss'"
            )
        if self.correction_low > self.correction_high:
            raise ValueError(f"algorithm.correction_low = {self.correction_low} is above correction_high = {self.correction_high}")
        return self
