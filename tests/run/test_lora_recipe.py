"""`[lora]` in recipes: what does not go with it is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles.config import ConfigError, load
from miles.run.recipe import RLRecipe

LORA = Path(__file__).parents[2] / "scripts" / "recipes" / "lora.toml"


def test_the_recipe_is_one() -> None:
    lora = load(RLRecipe, LORA).config.lora
    assert lora is not None
    assert lora.scaling == 2.0


def test_sglang_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[lora\] with rollout.engine = 'sglang' is not there yet"):
        load(RLRecipe, LORA, ["rollout.engine=sglang"])


def test_dropout_is_no_option() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'lora\.dropout'"):
        load(RLRecipe, LORA, ["lora.dropout=0.1"])
