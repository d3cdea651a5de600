"""Where a resumed run goes on, on which data, and what it says about a recipe that changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles.config import ConfigError, load
from miles.core.checkpoint.store import MANIFEST, CheckpointStore
from miles.run.assemble import made_by
from miles.run.recipe import RLRecipe, SFTRecipe
from miles.run.resume import first_step, position

ADAPTERS = ("lora.rank=4", 'lora.targets=["q_proj","k_proj"]')


def recipe(*overrides: str) -> SFTRecipe:
    return load(SFTRecipe, None, ["model.path=m", *overrides]).config


def folder_of_a_run(root: Path, *, step: int, extra: dict[str, Any]) -> CheckpointStore:
    """A run folder with `recipe()` in config.json and one complete checkpoint."""
    store = CheckpointStore(root / "checkpoints")
    store.begin(step).mkdir(parents=True)
    (store.begin(step) / MANIFEST).write_text(json.dumps({"extra": {"version": step} | extra}), encoding="utf-8")
    (root / "config.json").write_text(json.dumps(recipe().model_dump(mode="json")), encoding="utf-8")
    return store


@pytest.mark.parametrize("extra", [{"stream": "data"}, {"producer": {"stream": "data"}}], ids=["supervised", "rl"])
def test_records_go_on_behind_the_last_complete_checkpoint_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture, extra: dict[str, Any]) -> None:
    store = folder_of_a_run(tmp_path, step=10, extra=extra)
    store.begin(20).mkdir()
    assert first_step(recipe(), store, "data") == 11
    assert not caplog.records


def test_other_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = folder_of_a_run(tmp_path, step=10, extra={"stream": "data"})
    with pytest.raises(ConfigError, match="the data or its order is not what the checkpoint's position was counted in"):
        first_step(recipe(), store, "other data")


def test_options_that_changed_are_named_with_both_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first_step(recipe("trainer.lr=0.5", "checkpoint.every=7"), folder_of_a_run(tmp_path, step=10, extra={"stream": "data"}), "data")
    assert caplog.messages == ["--resume: other options than before: checkpoint.every = 7, was 0; trainer.lr = 0.5, was 1e-06"]


def test_a_run_that_has_ended_says_that_nothing_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first_step(recipe(), folder_of_a_run(tmp_path, step=100, extra={"stream": "data"}), "data")
    assert "of step 100 and run.steps = 100, so there is nothing left to train" in caplog.text


def test_a_resumed_run_without_a_checkpoint_says_that_it_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert first_step(recipe(), CheckpointStore(tmp_path / "checkpoints"), "data") is None
    assert f"no complete checkpoint in {tmp_path / 'checkpoints'}, so the run begins anew" in caplog.text


def test_a_model_of_another_size_is_refused_by_both_names(tmp_path: Path) -> None:
    for name, hidden in (("small", 32), ("large", 64)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": hidden, "vocab_size": 50}), encoding="utf-8")
    small, large = (recipe(f"model.path={tmp_path / name}") for name in ("small", "large"))
    store = folder_of_a_run(tmp_path, step=10, extra=position(small, 10) | {"stream": "data"})
    assert first_step(small, store, "data") == 11
    with pytest.raises(ConfigError, match=rf"'{tmp_path}/large' has hidden_size = 64, but the checkpoint is of '{tmp_path}/small' with hidden_size = 32"):
        first_step(large, store, "data")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["lora.rank=8"], r"lora\.rank is 8, but the checkpoint is of a run in which it was 4"),
        (["lora.rank=4", 'lora.targets=["q_proj"]'], r"lora\.targets is \['q_proj'\], .* in which it was \['k_proj', 'q_proj'\]"),
        ([], r"\[lora\] is left out, .* in which it was given"),
        ([*ADAPTERS, "trainer.backend=megatron"], r"trainer\.backend is megatron, .* in which it was fsdp"),
    ],
)
def test_other_trained_parts_of_the_model_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    begun = recipe(*ADAPTERS)
    store = folder_of_a_run(tmp_path, step=10, extra=position(begun, 10) | {"stream": "data"})
    again = recipe("lora.rank=4", 'lora.targets=["k_proj","q_proj"]', "lora.alpha=5", "lora.served=merged")
    assert first_step(again, store, "data") == 11, "neither their order nor what their outputs are multiplied by is in a checkpoint"
    assert first_step(recipe("lora.rank=4"), store, "data") == 11, "all targets may be those"
    with pytest.raises(ConfigError, match=message):
        first_step(recipe(*options), store, "data")


def test_what_waiting_groups_were_made_by_is_rewards_temperature_and_size() -> None:
    def digest(*overrides: str) -> str:
        return made_by(load(RLRecipe, None, ["model.path=m", *overrides]).config)

    kept = digest("reward.workers=3", "reward.timeout_s=1", "rollout.timeout_s=1", "trainer.lr=1", "rollout.top_k=5")
    assert digest() == kept, "log-probs are of the whole distribution, whatever top_k keeps"
    others = [digest(o) for o in ("rollout.temperature=0.7", "rollout.samples_per_prompt=4", "reward.steps=x", 'reward.functions=[{name="math"}]')]
    assert len({digest(), *others}) == 5
