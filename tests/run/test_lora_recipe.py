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


def test_sglang_serves_adapters() -> None:
    load(RLRecipe, LORA, ["rollout.engine=sglang"])
    load(RLRecipe, LORA, ["rollout.engine=sglang", 'lora.targets=["q_proj", "v_proj"]'])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.dora=true", "lora.dora = true does not go with [lora] and rollout.engine = 'sglang'"),
        ("model.true_on_policy=true", "model.true_on_policy does not go with [lora] and rollout.engine = 'sglang'"),
        ('lora.targets=["q_proj", "k_proj"]', "lora.targets = ['q_proj', 'k_proj'] lacks v_proj, which rollout.engine = 'sglang' needs beside q_proj, k_proj"),
        ('lora.targets=["up_proj"]', "lora.targets = ['up_proj'] lacks gate_proj"),
    ],
)
def test_adapters_that_sglang_cannot_serve(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RLRecipe, LORA, ["rollout.engine=sglang", override])
    assert message in str(caught.value)


def test_merged_adapters_go_into_any_engine_but_not_by_slices() -> None:
    assert load(RLRecipe, LORA, ["rollout.engine=sglang", "lora.served=merged", "lora.dora=true"]).config.served_lora is None
    with pytest.raises(ConfigError, match=r"lora.served = 'merged' does not go with weight_sync.transport = 'p2p'"):
        load(RLRecipe, LORA, ["lora.served=merged", "weight_sync.transport=p2p"])


def test_dropout_is_no_option() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'lora\.dropout'"):
        load(RLRecipe, LORA, ["lora.dropout=0.1"])
