"""HiLoRe on two data-parallel ranks under FSDP2: real processes on gloo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from miles.core.memory.profile import Profile
from miles.core.planning.meters import Meter
from tests.trainer_cases import make_backend, mixed_groups, small_model, weights
from tests.trainer_pool import Pool

PROFILE = Profile(recompute=(1e-5, 1e-5), compress=(2e-6, 2e-6))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("hilore_ranks"))


def two_steps(rank: int, world: int, path: Path, trainer: dict[str, Any], cache: Path) -> tuple[dict[str, Any], list[dict[str, float]], int, int]:
    """Weights and metrics after two steps, and the bytes that a third one held beside their budget (a meter's operators sum in another order)."""
    os.environ["MILES_CACHE"] = str(cache)
    backend = make_backend(path, rank=rank, world=world, trainer={"max_tokens_per_microbatch": 24} | trainer, dtype=torch.float32)
    chosen = backend._hilore
    if chosen is not None and rank == 0:  # rank 1 has none, so both must measure
        chosen.profile = PROFILE
    metrics = [backend.step_rl(mixed_groups()).metrics]
    if chosen is not None:
        chosen.profile = PROFILE
    metrics.append(backend.step_rl(mixed_groups()).metrics)
    found = {name: tensor.copy() for name, tensor in weights(backend).items()}
    if chosen is None:
        return found, metrics, 0, 0
    with Meter(backend.model, backend._activations.ledger) as meter:
        backend.step_rl(mixed_groups())
    assert meter.peak_saved_bytes == chosen.peak
    return found, metrics, chosen.peak, chosen.budget


def test_without_risk_two_ranks_give_the_bits_of_two_that_keep_everything(model: Path, two_ranks: Pool, tmp_path: Path) -> None:
    expected = two_ranks.run(two_steps, model, {}, tmp_path)
    options = {"activations": "hilore", "activation_memory": 1.3, "activation_risk": 0.0}
    found = two_ranks.run(two_steps, model, options, tmp_path)
    for (weights_0, metrics_0, *_), (weights_1, metrics_1, peak, budget) in zip(expected, found, strict=True):
        assert all((weights_0[name] == weights_1[name]).all() for name in weights_0)
        assert [{name: after[name] for name in before} for before, after in zip(metrics_0, metrics_1, strict=True)] == metrics_0
        assert 0 < peak <= budget


def test_with_risk_two_ranks_agree_and_stay_near_the_exact_step(model: Path, two_ranks: Pool, tmp_path: Path) -> None:
    (_, exact, *_), _ = two_ranks.run(two_steps, model, {}, tmp_path)
    options = {"activations": "hilore", "activation_memory": 1.5, "activation_risk": 0.05}
    found = two_ranks.run(two_steps, model, options, tmp_path)
    assert found[0][1] == found[1][1]
    second = found[0][1][1]
    assert second["activations/risk"] <= 0.05
    assert second["activations/fell_back"] == 0
    assert second["optimizer/grad_norm"] == pytest.approx(exact[1]["optimizer/grad_norm"], rel=0.05)
