"""A whole run with `trainer.backend = "megatron"`: Ray, the torch engine, tensor parallelism on gloo, weight sync, checkpoints, and one as `fsdp` trains it."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles.config import ConfigError
from miles.run import explain, preflight, rl
from tests.run.runs import learned, make_task, records, rl_overrides, rl_recipe

pytestmark = pytest.mark.usefixtures("ray_cluster")

TENSOR = ('trainer.backend="megatron"', "trainer.ranks=2", "trainer.tensor_parallel=2", "cluster.cpus=4")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_task(tmp_path_factory.mktemp("task"))


def test_the_engine_has_the_trainers_log_probs_after_every_update(task: dict[str, Path], tmp_path: Path) -> None:
    """Weights arrive whole, under the names that the engine knows."""
    rl.run(rl_recipe(task, tmp_path / "run", *TENSOR, "run.steps=3", "checkpoint.export=true"))
    steps = [r for r in records(tmp_path / "run") if "reward/mean" in r]
    assert [r["version/trained"] for r in steps] == [1, 2, 3]
    assert max(r["mismatch/logprob_abs_max"] for r in steps) < 1e-5
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.full
def test_adapters_alone_reach_the_engine(task: dict[str, Path], tmp_path: Path) -> None:
    options = ("lora.rank=4", "lora.alpha=8", "trainer.lr=1e-2", "algorithm.kl_coef=0.01")
    rl.run(rl_recipe(task, tmp_path / "run", *TENSOR, *options, "run.steps=3", "checkpoint.export=true"))
    steps = [r for r in records(tmp_path / "run") if "reward/mean" in r]
    assert max(r["mismatch/logprob_abs_max"] for r in steps) < 1e-5
    assert steps[-1]["policy/kl"] > 0
    assert [path.name for path in (tmp_path / "run").rglob("adapter_model.safetensors")]


@pytest.mark.full
def test_a_resumed_run_is_the_one_that_went_on(task: dict[str, Path], tmp_path: Path) -> None:
    options = (*TENSOR, "checkpoint.every=2", "checkpoint.keep=9")
    rl.run(rl_recipe(task, tmp_path / "whole", *options))
    rl.run(rl_recipe(task, tmp_path / "half", *options, "run.steps=2"))
    rl.run(rl_recipe(task, tmp_path / "half", *options), resume=True)
    assert learned(tmp_path / "half")[-2:] == learned(tmp_path / "whole")[-2:]


def test_miles_config_shows_the_mesh_and_what_a_rank_holds(task: dict[str, Path], tmp_path: Path) -> None:
    overrides = rl_overrides(task, tmp_path / "run", *TENSOR, "trainer.ranks=8", "trainer.pipeline_parallel=2")
    recipe = tmp_path / "empty.toml"
    recipe.write_text("")
    text = explain.explain(str(recipe), overrides, "rl")
    assert "mesh: 8 ranks = 2 data x 2 tensor x 2 pipeline-parallel" in text
    assert "stage 0 has layers 0-0; stage 1 has layers 1-1" in text
    assert "each of 2 data-parallel ranks packs" in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("trainer.tensor_parallel=4", "trainer.ranks=4"), "2 key-value heads do not divide by trainer.tensor_parallel = 4: 2 / 4 = 0.50"),
        (("trainer.ranks=3",), "trainer.ranks = 3 does not divide by"),
        (("model.true_on_policy=true",), "does not go with model.true_on_policy"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(task: dict[str, Path], tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight.check_rl(rl_recipe(task, tmp_path / "run", *TENSOR, *overrides))
