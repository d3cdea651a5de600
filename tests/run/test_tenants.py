"""`[tenants]`: several adapters trained and served at once, each as if it were alone, whatever becomes of the others."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from miles.config import ConfigError, load
from miles.run import rl, tenants
from miles.run.preflight import check_rl
from miles.run.recipe import RLRecipe
from tests.run.runs import learned, make_task, rl_overrides, rl_recipe

LORA = ("lora.rank=4", "lora.alpha=8", "checkpoint.export=true", "run.steps=3", 'reward.functions=[{name="tests.run.runs:share_of", args={letter="b"}}]')
TWO = ("lora.rank=2", 'lora.targets=["q_proj", "v_proj"]', "trainer.lr=3e-2", 'reward.functions=[{name="tests.run.runs:share_of", args={letter="a"}}]')


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_task(tmp_path_factory.mktemp("tenants"))


@pytest.fixture(scope="module")
def alone(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Path:
    """The folder of a run of one adapter."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    rl.run(rl_recipe(task, folder, *LORA, *TWO))
    return folder


@pytest.fixture(scope="module")
def together(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> tuple[Path, str]:
    """The folder of a run of the same one beside another and two that go wrong, and what it said in the end."""
    folder = tmp_path_factory.mktemp("together") / "run"
    raises = ('reward.functions=[{name="tests.run.runs:always_raises"}]', "reward.max_failures=2")
    own = {"one": ("trainer.lr=1e-2",), "raises": raises, "two": TWO, "wild": ("trainer.lr=1e38", "trainer.clip_norm=inf")}
    recipe = rl_recipe(task, folder, *LORA, *(f"tenants.{name}.{override}" for name, overrides in own.items() for override in overrides))
    with pytest.raises(tenants.TenantsFailed) as caught:
        tenants.run(recipe)
    return folder, str(caught.value)


def test_a_tenant_trains_what_it_would_alone_bit_for_bit(alone: Path, together: tuple[Path, str]) -> None:
    folder = together[0] / "two"
    assert len(learned(folder)) == 3
    assert learned(folder) == learned(alone)
    assert _bytes(folder / "adapter") == _bytes(alone / "adapter")
    assert _bytes(folder / "model") == _bytes(alone / "model")
    assert _bytes(folder / "adapter").values() != _bytes(together[0] / "one" / "adapter").values()


def test_tenants_that_fail_are_named_when_the_others_are_done(together: tuple[Path, str]) -> None:
    assert together[1] == "2 of 4 tenants failed, the others are done: raises, wild"


@pytest.mark.full
def test_a_tenant_outlives_the_engine_that_all_of_them_share(task: dict[str, Path], tmp_path: Path, ray_cluster: None) -> None:
    """Its reward kills the process in the third step: the next one has each tenant at its own version."""
    kills = f'reward.functions=[{{name="tests.run.runs:kills_its_engine_once", args={{flag="{tmp_path / "flag"}"}}}}]'
    two = (f"tenants.two.{override}" for override in (*TWO[:-1], kills))
    assert tenants.run(rl_recipe(task, tmp_path / "run", *LORA, "tenants.one.trainer.lr=1e-2", *two)) == 0
    steps = learned(tmp_path / "run" / "two")
    assert len(steps) == len(learned(tmp_path / "run" / "one")) == 3
    assert steps[-1]["groups/failed"] > 0
    assert max(step["mismatch/logprob_abs_max"] for step in steps) < 1e-4  # what an engine at version 0 would not be within


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.backend=megatron", "[tenants] does not go with trainer.backend = 'megatron': use 'fsdp'"),
        ("rollout.engine=sglang", "[tenants] does not go with rollout.engine = 'sglang': use 'torch'"),
        ("weight_sync.transport=broadcast", "[tenants] does not go with weight_sync.transport = 'broadcast': use 'tensor'"),
        ("tenants.two.lora.served=merged", "tenants.two: lora.served and evaluate.engines are the same for all tenants"),
        ("tenants.two.lora.ranks=3", "unknown option 'tenants.two.lora.ranks'"),
        ("tenants.a/b.trainer.lr=0.1", "names a folder too"),
    ],
)
def test_what_tenants_do_not_go_with(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RLRecipe, None, ["model.path=model", "lora.rank=2", "tenants.two.trainer.lr=1e-3", override])
    assert message in str(caught.value)


def test_a_model_that_is_trained_whole_has_no_tenants() -> None:
    with pytest.raises(ConfigError, match=r"\[tenants\] does not go with a model that is trained whole: add a \[lora\] section"):
        load(RLRecipe, None, ["model.path=model", "tenants.two.trainer.lr=1e-3"])


def test_what_a_tenant_does_not_say_is_as_in_the_recipe(task: dict[str, Path], tmp_path: Path) -> None:
    recipe = load(RLRecipe, None, [*rl_overrides(task, tmp_path / "run"), *LORA, "tenants.two.lora.rank=2", "tenants.two.trainer.warmup_steps=1"]).config
    two = recipe.of_tenants()["two"]
    assert two == load(RLRecipe, None, [*rl_overrides(task, tmp_path / "run" / "two"), *LORA, "lora.rank=2", "trainer.warmup_steps=1"]).config


def test_a_tenant_that_had_not_begun_begins_when_the_others_go_on(task: dict[str, Path], tmp_path: Path) -> None:
    recipe = rl_recipe(task, tmp_path / "run", *LORA, "tenants.one.trainer.lr=1e-2", "tenants.two.trainer.lr=1e-3")
    with pytest.raises(ConfigError, match="holds no run to go on with"):
        check_rl(recipe, resume=True)
    (tmp_path / "run" / "one").mkdir(parents=True)
    (tmp_path / "run" / "one" / "metrics.jsonl").touch()
    check_rl(recipe, resume=True)
    with pytest.raises(ConfigError, match="is not empty"):
        check_rl(recipe, resume=False)


def _bytes(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.safetensors"))}
