"""Staged weights of the torch engine: what arrives late belongs to nobody."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from miles.core.model.load import load_model
from miles.core.model.tiny import make_tiny_model
from rollout.engines import torch_weights
from weight_sync.contracts import Bucket, Manifest, SharedMemory, TensorSpec


def test_a_read_that_outlives_its_aborted_update_never_reaches_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine died, so the driver aborted and published again, while a thread of the first attempt still read its bucket."""
    model = load_model(make_tiny_model(tmp_path / "model", alphabet="abc", hidden=16, layers=1, heads=2, kv_heads=1))
    weights = torch_weights.StagedWeights(model, 0)
    specs = tuple(weights.specs.values())
    first, second = Bucket(0, specs[: len(specs) // 2]), Bucket(1, specs[len(specs) // 2 :])
    entered, go_on = threading.Event(), threading.Event()

    def read(bucket: Bucket, payload: SharedMemory) -> dict[str, torch.Tensor]:
        if payload.path == "old":
            entered.set()
            assert go_on.wait(10)
        return {spec.name: _filled(spec, 1.0 if payload.path == "old" else 2.0) for spec in bucket.tensors}

    monkeypatch.setattr(torch_weights, "read_bucket", read)
    weights.begin(Manifest(1, (first, second)))
    late = threading.Thread(target=weights.receive, args=(first, SharedMemory("old", 0)))
    late.start()
    assert entered.wait(10)
    weights.abort()
    weights.begin(Manifest(1, (first, second)))
    weights.receive(first, SharedMemory("new", 0))
    go_on.set()
    late.join(10)
    weights.receive(second, SharedMemory("new", 0))
    weights.commit(1)
    assert {float(value) for tensor in model.state_dict().values() for value in tensor.flatten()[:1]} == {2.0}


def _filled(spec: TensorSpec, value: float) -> torch.Tensor:
    return torch.full(spec.shape, value)
