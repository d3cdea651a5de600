"""`miles prefer` and `miles reward` with everything real: files, Ray, FSDP2, checkpoints, and the reward function at the end."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from miles.config import ConfigError, Resolved, load
from miles.core.model.load import load_tokenizer
from miles.data.config import PairDataConfig
from miles.data.preference import PairDataset
from miles.data.types import Prompt
from miles.run import prefer, reward
from miles.run.recipe import PreferenceRecipe, RewardModelRecipe
from rollout.config import RewardConfig, RewardItem
from rollout.rewards.registry import resolve
from rollout.rewards.runner import RewardRunner
from tests.run.runs import learned, make_task, records, weights

FOUR_STEPS = ("run.steps=4", "checkpoint.every=2", "checkpoint.keep=9")

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Answers are better when their letters come from the first half of the alphabet, which a random model learns in a few steps."""
    paths = make_task(tmp_path_factory.mktemp("task"))
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list(letters), 3)) for _ in range(64) for letters in ("abcdefghij", "abcde", "fghij")]
    rows = [dict(zip(("prompt", "chosen", "rejected"), words[i : i + 3], strict=True)) for i in range(0, len(words), 3)]
    paths["pairs"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def overrides(task: dict[str, Path], folder: Path, *more: str) -> list[str]:
    common = [f"run.folder={folder}", f"model.path={task['model']}", f'data.paths=["{task["pairs"]}"]', "batch_size=16", "trainer.lr=1e-2"]
    return [*common, *more]


@pytest.mark.parametrize("objective", ["dpo", *(pytest.param(name, marks=pytest.mark.full) for name in ("ipo", "kto", "orpo", "simpo"))])
def test_a_policy_learns_what_is_better_in_pairs_it_never_saw(task: dict[str, Path], tmp_path: Path, objective: str) -> None:
    """Its own measures, before, on the way and at the end: the last eight of 64 pairs are held out."""
    data = [f'data.paths=["{task["pairs"]}@[0:56]"]', f'evaluate.data.paths=["{task["pairs"]}@[56:64]"]', "evaluate.every=5"]
    folder = tmp_path / "run"
    prefer.run(load(PreferenceRecipe, None, overrides(task, folder, f"preference.objective={objective}", "run.steps=8", "checkpoint.export=false", *data)))
    evaluated = {r["step"]: r for r in records(folder) if "eval/preference_accuracy" in r}
    assert list(evaluated) == [0, 5, 8]
    first, _, last = evaluated.values()
    assert last["eval/preference_accuracy"] > 0.9
    assert last["eval/preference_margin"] > first["eval/preference_margin"]
    assert last["eval/preference_loss"] < first["eval/preference_loss"]


def test_kto_refuses_a_single_held_out_pair(task: dict[str, Path], tmp_path: Path) -> None:
    data = [f'evaluate.data.paths=["{task["pairs"]}@[0:1]"]', "evaluate.every=1"]
    with pytest.raises(ConfigError, match="hold out more"):
        prefer.run(load(PreferenceRecipe, None, overrides(task, tmp_path / "run", "preference.objective=kto", *data)))


def test_held_out_pairs_that_are_not_there_are_named(task: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluate.data.paths is empty"):
        prefer.run(load(PreferenceRecipe, None, overrides(task, tmp_path / "run", "evaluate.every=1")))


@pytest.mark.full
@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_resumed_run_equals_the_uninterrupted_one(task: dict[str, Path], tmp_path: Path, objective: str) -> None:
    def recipe(name: str) -> Resolved[PreferenceRecipe]:
        return load(
            PreferenceRecipe,
            None,
            overrides(task, tmp_path / name, f"preference.objective={objective}", *FOUR_STEPS),
        )

    prefer.run(recipe("whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "half", ignore=shutil.ignore_patterns("step_00000004", "model"))
    prefer.run(recipe("half"), resume=True)
    assert weights(tmp_path / "half") == weights(tmp_path / "whole")
    assert learned(tmp_path / "half") == learned(tmp_path / "whole")


@pytest.mark.full
def test_a_reward_model_learns_and_rewards_samples_as_in_training(task: dict[str, Path], tmp_path: Path) -> None:
    """Through worker processes, as a run calls it: chosen answers get more than rejected ones."""
    data = [f'data.paths=["{task["pairs"]}@[0:56]"]', f'evaluate.data.paths=["{task["pairs"]}@[56:64]"]', "evaluate.every=8"]
    reward.run(load(RewardModelRecipe, None, overrides(task, tmp_path / "run", "run.steps=8", *data)))
    found = records(tmp_path / "run")
    assert np.mean([r["preference/accuracy"] for r in found[-3:]]) > 0.9 > found[1]["preference/accuracy"]
    assert found[-1]["eval/preference_accuracy"] > 0.9 > found[0]["eval/preference_accuracy"]
    tokenizer = load_tokenizer(task["model"])
    pairs = PairDataset.load(PairDataConfig(paths=[str(task["pairs"])]), tokenizer, 64)
    prompt = Prompt(prompt_id=0, tokens=pairs[0][0].tokens[:1], text="", columns={})
    runner = RewardRunner(RewardConfig(functions=[RewardItem(name="reward_model", args={"path": str(tmp_path / "run" / "model")})]), tokenizer)
    try:
        scored = asyncio.run(runner.score([sample for i in range(len(pairs)) for sample in pairs[i]], prompt))
    finally:
        runner.close()
    rewards = np.array([sample.reward for sample in scored], float).reshape(-1, 2)
    assert (rewards[:, 0] > rewards[:, 1]).mean() > 0.9


def test_a_language_model_as_a_reward_model_is_refused_before_the_run(task: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="holds a Qwen3ForCausalLM, not a reward model"):
        resolve(RewardConfig(functions=[RewardItem(name="reward_model", args={"path": str(task["model"])})]))


def test_kto_needs_a_second_pair() -> None:
    with pytest.raises(ConfigError, match="use at least 2"):
        load(PreferenceRecipe, None, ["model.path=m", "batch_size=1", "preference.objective=kto"])
