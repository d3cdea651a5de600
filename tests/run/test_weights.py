"""`miles weights`: the table of a recipe against the model's own file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from miles import cli
from miles.config import ConfigError, load
from miles.run.recipe import RLRecipe
from miles.run.weights import Map, weight_map

RECIPE = """
[run]
folder = "run"
steps = 1
[model]
path = "{path}"
[data]
paths = ["data.jsonl"]
[rollout]
prompts_per_step = 2
samples_per_prompt = 2
max_new_tokens = 4
[[reward.functions]]
name = "exact_match"
[algorithm]
advantages = "grpo"
[trainer]
ranks = 2
"""
SGLANG = ["rollout.engine=sglang", "rollout.sglang_args.tp_size=2"]


@pytest.fixture
def recipe(tiny_model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(path=tiny_model))
    return path


def mapped(recipe: Path, *overrides: str) -> Map:
    return weight_map(load(RLRecipe, str(recipe), list(overrides)).config)


@pytest.mark.parametrize("overrides", [[], ["trainer.ranks=3"], ["trainer.backend=megatron", "trainer.tensor_parallel=2"]])
def test_owners_make_up_every_tensor_of_the_file(recipe: Path, tiny_model: Path, overrides: list[str]) -> None:
    rows = mapped(recipe, *overrides).rows
    stored = load_file(tiny_model / "model.safetensors")
    assert {row.spec.name: row.spec.shape for row in rows} == {name: tensor.shape for name, tensor in stored.items()}
    for row in rows:
        counts = np.zeros(row.spec.shape, int)
        for ranges in row.owners:
            counts[tuple(slice(*r) for r in ranges)] += 1
        assert (counts == 1).all(), row.spec.name


@pytest.mark.parametrize(
    ("overrides", "copies"), [(["trainer.ranks=4", "trainer.replicas=2"], 2), (["lora.rank=4"], 1), (["lora.rank=4", "trainer.backend=megatron"], 2)]
)
def test_replicas_hold_every_slice_again_and_of_adapters_nothing_else_is_told(recipe: Path, overrides: list[str], copies: int) -> None:
    rows = mapped(recipe, *overrides).rows
    assert all((".lora_" in row.spec.name) == ("lora.rank=4" in overrides) for row in rows)
    for row in rows:
        counts = np.zeros(row.spec.shape, int)
        for ranges, ranks in row.owners.items():
            counts[tuple(slice(*r) for r in ranges)] += len(ranks)
        assert (counts == copies).all(), row.spec.name


def test_bytes_add_up(recipe: Path, tiny_model: Path) -> None:
    whole = sum(tensor.nbytes for tensor in load_file(tiny_model / "model.safetensors").values())
    found = mapped(recipe)
    assert sum(found.sends) == sum(row.nbytes for row in found.rows) == whole
    assert found.engine_bytes == [whole]
    norms = sum(row.nbytes for row in found.rows if "norm" in row.spec.name)
    assert sum(mapped(recipe, *SGLANG).engine_bytes) == whole + norms
    assert sum(mapped(recipe, "model.dtype=bfloat16").sends) == whole // 2


def test_layers_that_are_alike_share_a_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["weights", str(recipe), *SGLANG]) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    line = next(line for line in printed if "k_proj" in line)
    assert line == (
        "model.layers.{0-1}.self_attn.k_proj.weight 32x64 float32 8,192 0[0:16,:] 1[16:32,:] "
        "0[0:16,:] in qkv_proj.weight[32:48,0:64] 1[16:32,:] in qkv_proj.weight[32:48,0:64]"
    )


def test_what_has_no_engine_and_what_does_not_divide_is_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"q_proj\.weight \[64, 64\] does not divide over 3 tensor-parallel engine ranks"):
        mapped(recipe, "rollout.engine=sglang", "rollout.sglang_args.tp_size=3")
    with pytest.raises(ConfigError, match=r"trainer\.tensor_parallel = 2: which slices fsdp's ranks then hold is not told"):
        mapped(recipe, "trainer.tensor_parallel=2")
    assert cli.main(["weights", "scripts/recipes/quickstart_sft.toml"]) == 2
