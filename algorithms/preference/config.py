"""The `[preference]` section of `miles prefer` and the `[reward_model]` section of `miles reward`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miles.config import Section

_BETA = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "simpo": 2.0}


class PreferenceConfig(Section):
    """How a policy learns from chosen and rejected answers."""

    objective: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = Field("dpo", description="orpo and simpo need no reference model")
    beta: float | None = Field(None, gt=0, description="dpo, ipo, kto: pull to the reference; simpo: scale of its rewards; null: 0.1, for simpo 2.0")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="dpo: share of pairs that are labelled the wrong way round")
    good_weight: float = Field(1.0, gt=0, description="kto: weight of chosen answers")
    bad_weight: float = Field(1.0, gt=0, description="kto: weight of rejected answers")
    odds_weight: float = Field(0.1, gt=0, description="orpo: weight of the odds ratio beside imitation of the chosen answer")
    gamma: float = Field(1.0, ge=0, description="simpo: the margin that is asked for; gamma / beta is mostly 0.3 to 0.6")

    @property
    def scale(self) -> float:
        """`beta`, or the objective's usual one. ORPO has none: its reward is the mean log-prob itself."""
        return self.beta or _BETA.get(self.objective, 1.0)

    @property
    def needs_reference(self) -> bool:
        return self.objective in ("dpo", "ipo", "kto")


class RewardModelConfig(Section):
    """How a reward model learns from chosen and rejected answers (Bradley-Terry)."""

    margin: float = Field(0.0, ge=0, description="how far apart the rewards of a pair should be at least")
    centre: float = Field(0.0, ge=0, description="weight of (chosen + rejected)^2, which keeps rewards around 0; usually 0.01")


PairConfig = PreferenceConfig | RewardModelConfig
"""What a trainer of pairs is built with."""
