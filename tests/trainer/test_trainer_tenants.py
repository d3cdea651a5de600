"""Backends with adapters of their own on one base: none moves another, and the base is in memory once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from tests.lora_cases import LORA
from tests.trainer_cases import make_backend, mixed_groups, small_model
from tests.trainer_pool import Pool

OPTIONS: list[dict[str, Any]] = [
    {"lora": LORA, "algorithm": {"kl_coef": 0.1}},
    {"lora": LORA | {"rank": 2, "targets": ["q_proj", "down_proj"]}, "trainer": {"lr": 1e-2, "activations": "recompute"}},
]
WILD: dict[str, Any] = {"lora": LORA, "trainer": {"lr": 1e300}}
State = dict[str, NDArray[Any]]


def trained(rank: int, world: int, path: Path, options: list[dict[str, Any]], steps: int) -> tuple[list[State], float, list[bool]]:
    """What each of several tenants is after `steps`, the share of this rank's base elements that the last one has in memory of its own, and whose last
    step was left out."""
    backends: list[Any] = []
    for own in options:
        base = backends[0].model if backends else None
        backends.append(make_backend(path, rank=rank, world=world, base=base, **own))
    for _ in range(steps):
        empty = [backend.step_rl(mixed_groups()).empty for backend in backends]
    places = [{p.untyped_storage().data_ptr() for p in _base(backend)} for backend in backends]
    own_elements = sum(p.numel() for p in _base(backends[-1]) if p.untyped_storage().data_ptr() not in places[0])
    states = [{name: _local(tensor).numpy().copy() for name, tensor in backend._state().items()} for backend in backends]
    return states, own_elements / sum(p.numel() for p in _base(backends[-1])), empty


def _base(backend: Any) -> list[torch.Tensor]:
    return [_local(p.detach()) for p in backend.model.parameters() if not p.requires_grad]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("tenants"))


def test_tenants_on_one_rank_are_what_they_are_alone_also_beside_one_whose_gradients_are_not_finite(model: Path, one_rank: None) -> None:
    together, own, empty = trained(0, 1, model, [*OPTIONS, WILD], 3)
    assert empty == [False, False, True]
    for found, options in zip(together, OPTIONS, strict=False):
        _equal(found, trained(0, 1, model, [options], 3)[0][0])
    assert own == 0


def test_tenants_on_two_ranks_are_what_they_are_alone(model: Path, two_ranks: Pool) -> None:
    together = two_ranks.run(trained, model, OPTIONS, 2)
    for index, options in enumerate(OPTIONS):
        for (found, *_), (alone, *_) in zip(together, two_ranks.run(trained, model, [options], 2), strict=True):
            _equal(found[index], alone[0])
    assert all(own == 0 for _, own, _ in together)


def _equal(one: State, two: State) -> None:
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert all(np.isfinite(value).all() for value in one.values())
