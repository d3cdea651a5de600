"""The `[algorithm]` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles.config import Section


class AlgorithmConfig(Section):
    """The objective: how rewards become advantages, and advantages a loss."""

    advantages: str = Field("grpo", description="advantage estimator by name, or a function of yours as module:function")
    scale: Literal["std", "none", "mean_abs"] = Field("std", description="what group-centred rewards are divided by; none is Dr.GRPO")
    loss: str = Field("ppo_clip", description="policy loss by name, or a function of yours as module:function")
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_constant"] = Field(
        "token_mean", description="token_mean is DAPO, sequence_mean is GRPO's paper, sequence_sum_constant is Dr.GRPO"
    )
    clip_low: float = Field(0.2, ge=0, description="ratios below 1 - clip_low are clipped")
    clip_high: float = Field(0.28, ge=0, description="ratios above 1 + clip_high are clipped (DAPO's clip-higher)")
    clip_dual: float | None = Field(
        None, gt=1, description="with a negative advantage the ratio counts at most this much (dual clip, usually 3); null: no bound"
    )
    old_logprobs: Literal["rollout", "recompute"] = Field(
        "rollout", description="the ratio's denominator: the engine's record, or the trainer's own scores at the step's start"
    )
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference model in the loss; above 0 loads a reference")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator that is reported; the loss uses its right gradient")
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    dynamic_sampling: bool = Field(False, description="drop groups whose rewards are all equal and sample others (DAPO)")
    max_sampling_rounds: int = Field(
        8, ge=1, description="with dynamic_sampling: how many times the batch may be refilled before the run stops with a diagnosis"
    )
