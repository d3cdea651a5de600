"""Pairs that are never trained on, and when a run of `miles prefer` or `miles reward` is measured on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles.config import ConfigError
from miles.core.model.config import ModelConfig
from miles.core.model.load import longest_sequence, tokenizer_of
from miles.data.preference import PairDataset
from miles.data.types import Sample
from miles.run.recipe import PairEvaluateConfig


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """`samples`: chosen and rejected answers in turn."""

    config: PairEvaluateConfig
    samples: Sequence[Sample]

    @classmethod
    def load(cls, config: PairEvaluateConfig, model: ModelConfig, *, at_least: int = 1) -> HeldOut | None:
        """None where the recipe asks for no evaluation.

        Raises:
            ConfigError: what is wrong with the data, or there are fewer than `at_least` pairs.
        """
        if not config.every:
            return None
        dataset = PairDataset.load(config.data, tokenizer_of(model), longest_sequence(model))
        if len(dataset) < at_least:
            raise ConfigError(f"evaluate.data has {len(dataset)} pairs, but the objective compares answers of {at_least}: hold out more")
        return cls(config=config, samples=[sample for i in range(len(dataset)) for sample in dataset[i]])

    def due(self, version: int, last: int) -> bool:
        """Whether to evaluate after `version` of `last` steps."""
        if version == 0:
            return self.config.at_start
        return version % self.config.every == 0 or version == last
