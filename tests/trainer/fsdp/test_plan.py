"""What `miles config` says of a layout. That a rank's bytes are those is in tests/conformance/test_trainers_layouts.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from algorithms.contracts import LossOutput
from miles.core.model.tiny import make_tiny_model
from miles.core.planning.meters import Meter
from miles.run.footprint import shapes
from tests.trainer_cases import make_backend, make_sample
from trainer.config import TrainerConfig
from trainer.fsdp.plan import RankBytes, bytes_of, describe
from trainer.rows.row import Row


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """11 tokens: an uneven vocabulary."""
    return make_tiny_model(tmp_path_factory.mktemp("plan") / "model", alphabet="ab", hidden=16, heads=4, kv_heads=2, context=512)


def planned(path: Path, **trainer: int) -> RankBytes:
    return bytes_of(TrainerConfig(**trainer), shapes(path), json.loads((path / "config.json").read_text()), bfloat16=False)  # type: ignore[arg-type]


def _sum(row: Row, logprobs_N: torch.Tensor, entropy_N: torch.Tensor | None) -> LossOutput:
    return LossOutput(loss=logprobs_N.sum())


def test_activations_are_about_what_autograd_keeps(model: Path) -> None:
    path = make_tiny_model(model.parent / "wider", alphabet="abcdef", hidden=64, heads=4, kv_heads=2, layers=3, context=512)
    backend = make_backend(path, dtype=torch.float32)
    sample = make_sample(0, 0, 12, 500)
    sample.tokens[:] = sample.tokens % 12
    row = backend._rows([sample])[0]
    with Meter(backend.model) as meter:
        backend._policy.loss(row, _sum, 1.0, by_token=True)
    assert planned(path, max_tokens_per_microbatch=512).activations == pytest.approx(meter.peak_saved_bytes, rel=0.15)


def test_experts_are_sharded_whole() -> None:
    """Three experts over two ranks: the first has two."""
    names = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": (8, 4) for e in range(3)}
    held = bytes_of(TrainerConfig(ranks=2), names, {}, bfloat16=False)
    assert held.weights == 4 * 2 * 32
    assert held.gathered == 4 * 3 * 32


def test_the_lines_say_the_mesh_and_the_bytes(model: Path) -> None:
    config = TrainerConfig(ranks=8, replicas=2, tensor_parallel=2)
    text = "\n".join(describe(config, shapes(model), json.loads((model / "config.json").read_text()), bfloat16=True, adapters=None))
    assert "mesh: 8 ranks = 2 replicas x 2 sharded x 2 tensor-parallel" in text
    assert "each of 2 layers" in text
    assert "by rows over 2 ranks" in text
    assert "4 heads / 2 = 2, 2 key-value heads / 2 = 1" in text
    assert "memory of a rank: " in text
