"""`fsdp` with the experts of a mixture divided over 2 and 4 ranks: everything is as on one process, and checkpoints move between layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from miles.core.model.config import LoraConfig, ModelConfig
from miles.data.types import Group
from tests.conformance.test_trainers_layouts import whole
from tests.trainer_cases import gradients, make_backend, mixed_groups, plain_gradients, relative_difference, small_model, weights
from tests.trainer_pool import Pool
from trainer.config import TrainerConfig
from trainer.fsdp import fits

pytestmark = pytest.mark.usefixtures("one_rank")

ROWS = {"max_tokens_per_microbatch": 24}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dense = small_model(tmp_path_factory.mktemp("dense"))
    folder = tmp_path_factory.mktemp("mixture") / "model"
    same = json.loads((dense / "config.json").read_text())
    sizes = {name: same[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, intermediate_size=32, moe_intermediate_size=12, num_experts=8, num_experts_per_tok=2, max_position_embeddings=128)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(dense).save_pretrained(folder)
    return folder


def opened(rank: int, world: int, path: Path, trainer: dict[str, Any]) -> Any:
    backend = make_backend(path, rank=rank, world=world, trainer=ROWS | trainer)
    backend.model.config._experts_implementation = "eager"  # the default one has no float64
    return backend


def lived(rank: int, world: int, path: Path, groups: list[Group], trainer: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Everything that dividing experts could get wrong, of one backend."""
    backend = opened(rank, world, path, trainer)
    found: dict[str, Any] = {"export": weights(backend), "logprobs": backend.logprobs([s for g in groups for s in g.samples])}
    found["metrics"] = backend.step_rl(groups).metrics
    found["gradients"] = gradients(backend)
    backend.step_rl(groups)
    backend.save(folder, {}, asynchronous=False)
    found["state"] = whole(backend)
    experts = [p for name, p in backend.model.named_parameters() if ".experts." in name]
    found["held"] = [tuple((p.to_local() if isinstance(p, DTensor) else p).shape) for p in experts]
    return found


def loaded(rank: int, world: int, path: Path, trainer: dict[str, Any], folder: Path) -> dict[str, Any]:
    backend = opened(rank, world, path, trainer)
    backend.load(folder)
    return whole(backend)


@pytest.fixture(scope="module")
def one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return lived(0, 1, model, mixed_groups(), {}, tmp_path_factory.mktemp("one") / "step_00000002")


@pytest.fixture(scope="module")
def lives(model: Path, two_ranks: Pool, four_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """By expert_parallel: the checkpoint it left, and what each rank found."""
    found = {}
    for pool, ranks, more in ((two_ranks, 2, {}), (four_ranks, 4, {"activations": "recompute"})):
        folder = tmp_path_factory.mktemp(f"experts_{ranks}") / "step_00000002"
        found[ranks] = folder, pool.run(lived, model, mixed_groups(), {"expert_parallel": ranks} | more, folder)
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_everything_is_as_on_one_process(model: Path, lives: dict[int, Any], one: dict[str, Any], ranks: int) -> None:
    found = lives[ranks][1][0]
    assert relative_difference(found["gradients"], plain_gradients(model, mixed_groups())) < 1e-12
    assert relative_difference(found["state"], one["state"]) < 1e-12
    for rank in lives[ranks][1]:
        assert rank["metrics"] == pytest.approx(one["metrics"], rel=1e-12, abs=1e-14)
        for scores, expected in zip(rank["logprobs"], one["logprobs"], strict=True):
            np.testing.assert_allclose(scores, expected, rtol=1e-12)
        assert {shape[0] for shape in rank["held"]} == {8 // ranks}


@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_leave_as_they_were_read(model: Path, lives: dict[int, Any], ranks: int) -> None:
    there = {name: tensor.double().numpy() for name, tensor in load_file(model / "model.safetensors").items()}
    found = lives[ranks][1][0]["export"]
    assert found.keys() == there.keys()
    assert all(np.array_equal(found[name], there[name]) for name in there)


def test_checkpoints_move_between_layouts(model: Path, lives: dict[int, Any], two_ranks: Pool) -> None:
    folder, ranks = lives[4]
    for found in (loaded(0, 1, model, {}, folder), two_ranks.run(loaded, model, {"expert_parallel": 2}, folder)[0]):
        assert found.keys() == ranks[0]["state"].keys()
        assert all(np.array_equal(found[name], value) for name, value in ranks[0]["state"].items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 4, "expert_parallel": 2}, "expert_parallel = 2 of trainer.ranks = 4: fsdp divides experts over all ranks or none"),
        ({"ranks": 2, "expert_parallel": 2, "prompt_sharing": True}, "does not go with trainer.prompt_sharing"),
    ],
)
def test_what_dividing_experts_does_not_go_with(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerConfig(**options)


def test_what_a_model_refuses(model: Path, tmp_path: Path) -> None:
    trainer = TrainerConfig(ranks=3, expert_parallel=3)
    with pytest.raises(ValueError, match="expert_parallel = 3 does not divide the model's num_experts = 8"):
        fits.check(ModelConfig(path=str(model)), trainer, None)
    with pytest.raises(ValueError, match="is for mixtures of the kind of qwen3_moe, and Qwen3ForCausalLM is none"):
        fits.check(ModelConfig(path=str(small_model(tmp_path))), trainer, None)
    with pytest.raises(ValueError, match=r"does not go with experts among lora\.targets"):
        fits.check(ModelConfig(path=str(model)), trainer, LoraConfig(targets=["down_proj"]))
