"""The recipes under scripts/recipes: each loads, is recognised for what it is, and every family of objectives has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from algorithms import registry
from algorithms.preference.config import PreferenceConfig
from miles.config import load
from miles.run.explain import KINDS, infer_kind

FILES = sorted((Path(__file__).parents[2] / "scripts/recipes").glob("*.toml"))


def recipes(kind: str) -> list[Any]:
    return [load(KINDS[kind], file).config for file in FILES if infer_kind(str(file)) == kind]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_of_ours_loads(file: Path) -> None:
    load(KINDS[infer_kind(str(file))], file)


def test_every_preference_objective_has_a_recipe() -> None:
    names = set(get_args(PreferenceConfig.model_fields["objective"].annotation))
    assert {recipe.preference.objective for recipe in recipes("prefer")} == names


def test_every_family_of_advantages_and_policy_losses_has_a_recipe() -> None:
    found = [recipe.algorithm for recipe in recipes("rl")]
    assert {a.advantages for a in found} >= {"grpo", "rloo", "reinforce_pp", "gdpo", "gae", "gigpo", "turn_grpo"}
    assert {a.loss for a in found} >= {"ppo_clip", "gspo", "cispo", "reinforce", "sapo", "dppo_tv"}
    assert {a.aggregation for a in found} == {"token_mean", "sequence_mean", "sequence_sum_constant"}
    assert any(a.dynamic_sampling for a in found)
    assert {a.correction for a in found} >= {"none", "importance", "truncate", "mask"}
    assert any(a.correction_level != "token" for a in found)
    assert any(a.sequence_mask is not None for a in found)
    assert any(a.entropy_guard != "none" for a in found)
    assert {a.kl_in for a in found if a.kl_coef} == {"loss", "reward"}
    assert any(a.kl_target is not None for a in found)


def test_every_objective_that_a_recipe_names_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, or by the import path of a function that lies beside the recipe."""
    monkeypatch.syspath_prepend(str(FILES[0].parents[2]))
    for recipe in recipes("rl"):
        registry.loss(recipe.algorithm)
        registry.advantage(recipe.algorithm)
    assert any(":" in recipe.algorithm.loss for recipe in recipes("rl"))


def test_every_kind_of_reward_has_a_recipe() -> None:
    names = {item.name for recipe in recipes("rl") for item in recipe.reward.functions}
    assert names >= {"exact_match", "length", "math", "judge", "reward_model"}


def test_each_command_that_trains_has_a_recipe() -> None:
    assert all(recipes(kind) for kind in KINDS)
