"""`fsdp` with its ranks laid out as replicas and as tensor-parallel ones: everything is as on one process, and checkpoints move between layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from miles.core.model.tiny import make_tiny_model
from miles.data.types import Group
from miles.run.footprint import shapes
from tests.trainer_cases import (
    VOCABULARY,
    gradients,
    make_backend,
    mixed_groups,
    plain_gradients,
    relative_difference,
    weights,
)
from tests.trainer_pool import Pool
from trainer.config import TrainerConfig
from trainer.fsdp.plan import bytes_of
from trainer.rows.schedule import Update

pytestmark = pytest.mark.usefixtures("one_rank")

EXACT = 1e-12
TWO = {"tensor": {"tensor_parallel": 2}, "replicas": {"replicas": 2}}
FOUR: dict[str, dict[str, Any]] = {
    "data x tensor": {"tensor_parallel": 2, "activations": "recompute"},
    "replicas x tensor": {"replicas": 2, "tensor_parallel": 2},
    "replicas x shards": {"replicas": 2, "offload": True},
}
ROWS = {"max_tokens_per_microbatch": 24}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two key-value heads, and a vocabulary that no even number of ranks divides evenly, tied."""
    alphabet = "".join(chr(0x100 + i) for i in range(VOCABULARY - 9 + 1))
    return make_tiny_model(tmp_path_factory.mktemp("layouts") / "model", alphabet=alphabet, hidden=16, heads=4, kv_heads=2, context=128)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return lived(0, 1, model, mixed_groups(), {}, tmp_path_factory.mktemp("one") / "step_00000001")


def lived(rank: int, world: int, path: Path, groups: list[Group], trainer: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Everything that a layout could get wrong, of one backend."""
    backend = make_backend(path, rank=rank, world=world, trainer=ROWS | trainer)
    samples = [s for g in groups for s in g.samples]
    found: dict[str, Any] = {"export": weights(backend), "logprobs": backend.logprobs(samples)}
    found["metrics"] = backend.step_rl(groups).metrics
    found["gradients"] = gradients(backend)
    backend.step_rl(groups)
    if folder is not None:
        backend.save(folder, {}, asynchronous=False)
    found["state"] = whole(backend)
    return found


def loaded(rank: int, world: int, path: Path, trainer: dict[str, Any], folder: Path) -> dict[str, Any]:
    backend = make_backend(path, rank=rank, world=world, trainer=ROWS | trainer)
    backend.load(folder)
    return whole(backend) | weights(backend)


def whole(backend: Any) -> dict[str, Any]:
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone().numpy() for name, t in backend._state().items()}


@pytest.fixture(scope="module")
def lives(model: Path, two_ranks: Pool, four_ranks: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By layout; each leaves a checkpoint."""
    root = tmp_path_factory.mktemp("layouts")
    found = {}
    for pool, layouts in ((two_ranks, TWO), (four_ranks, FOUR)):
        for name, trainer in layouts.items():
            folder = root / name.replace(" ", "_") / "step_00000002"
            found[name] = (folder, pool.run(lived, model, mixed_groups(), trainer, folder))
    return found


@pytest.mark.parametrize("layout", [*TWO, *FOUR])
def test_gradients_are_those_of_plain_transformers(model: Path, lives: dict[str, Any], layout: str) -> None:
    assert relative_difference(lives[layout][1][0]["gradients"], plain_gradients(model, mixed_groups())) < EXACT


@pytest.mark.parametrize("layout", [*TWO, *FOUR])
def test_metrics_are_those_of_one_process_on_every_rank(lives: dict[str, Any], expected: dict[str, Any], layout: str) -> None:
    for rank in lives[layout][1]:
        assert rank["metrics"] == pytest.approx(expected["metrics"], rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("layout", [*TWO, *FOUR])
def test_logprobs_are_those_of_one_process(lives: dict[str, Any], expected: dict[str, Any], layout: str) -> None:
    for found, one in zip(lives[layout][1][-1]["logprobs"], expected["logprobs"], strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-12)


@pytest.mark.parametrize("layout", [*TWO, *FOUR])
def test_weights_leave_as_they_were_read(model: Path, lives: dict[str, Any], layout: str) -> None:
    there = {name: tensor.double().numpy() for name, tensor in load_file(model / "model.safetensors").items()}
    found = lives[layout][1][0]["export"]
    assert found.keys() == there.keys()
    assert all(np.array_equal(found[name], there[name]) for name in there)


@pytest.mark.parametrize("layout", [*TWO, *FOUR])
def test_a_checkpoint_of_any_layout_loads_on_one_process(model: Path, lives: dict[str, Any], layout: str) -> None:
    folder, ranks = lives[layout]
    found = loaded(0, 1, model, {}, folder)
    assert all(np.array_equal(found[name], tensor) for name, tensor in ranks[0]["state"].items())


@pytest.mark.parametrize(("saved", "layout"), [("data x tensor", "replicas x tensor"), ("tensor", "data x tensor"), ("replicas x shards", "data x tensor")])
def test_a_checkpoint_of_one_layout_loads_at_another(model: Path, four_ranks: Pool, lives: dict[str, Any], saved: str, layout: str) -> None:
    folder, ranks = lives[saved]
    found = four_ranks.run(loaded, model, FOUR[layout], folder)[0]
    assert all(np.array_equal(found[name], tensor) for name, tensor in ranks[0]["state"].items())


def test_heads_that_do_not_divide_are_refused_with_their_number(model: Path, four_ranks: Pool) -> None:
    with pytest.raises(RuntimeError, match=r"trainer.tensor_parallel = 4 does not divide the model's num_key_value_heads = 2"):
        four_ranks.run(lived, model, mixed_groups(), {"tensor_parallel": 4}, None)


def test_ranks_that_do_not_divide_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"trainer.ranks = 6 does not divide by trainer.replicas x trainer.tensor_parallel = 2 x 2"):
        TrainerConfig(ranks=6, replicas=2, tensor_parallel=2)


@pytest.mark.parametrize("layout", TWO)
def test_a_rank_holds_the_bytes_that_miles_config_says(model: Path, two_ranks: Pool, layout: str) -> None:
    planned = bytes_of(TrainerConfig(ranks=2, **TWO[layout]), shapes(model), json.loads((model / "config.json").read_text()), bfloat16=False)
    found = two_ranks.run(held, model, TWO[layout])[0]
    assert found == {"weights": planned.weights, "gradients": planned.gradients, "optimizer": planned.optimizer}


def held(rank: int, world: int, path: Path, trainer: dict[str, Any]) -> dict[str, int]:
    backend = make_backend(path, rank=rank, world=world, dtype=torch.float32, trainer=trainer)
    kept: dict[str, int] = {}

    def step() -> Update:
        kept["gradients"] = sum(_bytes(p.grad) for p in backend.model.parameters())
        return Update(0.0, 0.0, True)

    backend._optimizer.step = step
    backend.step_rl(mixed_groups())
    moments = [t for name, t in backend._optimizer.tensors().items() if not name.endswith(".step")]
    return kept | {"weights": sum(_bytes(p) for p in backend.model.parameters()), "optimizer": sum(_bytes(t) for t in moments)}


def _bytes(tensor: Any) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes
