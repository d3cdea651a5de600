"""Updates of adapters alone, through every transport, from FSDP ranks into torch engines, each a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from miles.core.model.config import LoraConfig
from tests.lora_cases import stir
from tests.weight_sync.cast import Cast, publish
from tests.weight_sync.parts import scores
from weight_sync.buckets import plan
from weight_sync.gather import export_specs
from weight_sync.transaction import UpdateAborted

LORA = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def cast(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    """Two trainer ranks, two engines."""
    made = Cast(tiny_model, tmp_path_factory.mktemp("lora"), world=2, engines=2, lora=LORA)
    yield made
    made.close()


def trained(cast: Cast, factor: float) -> None:
    """Other adapters on the trainer."""
    asyncio.run(cast.trainer.run_on_ranks(stir, factor))


def check_log_probs_are_the_trainers(cast: Cast) -> None:
    for engine in cast.living().values():
        tokens, logprobs = engine.call("answer")
        np.testing.assert_allclose(logprobs, asyncio.run(cast.trainer.run_on_ranks(scores, tokens))[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("transport", ["tensor", "broadcast", "p2p", "delta"])
def test_an_update_of_adapters_reaches_every_engine(cast: Cast, tmp_path: Path, tiny_model: Path, transport: str) -> None:
    version = cast.next_version()
    before = cast.engines.processes[0].call("answer")[1]
    trained(cast, 0.5 + 0.1 * version)
    result = publish(cast.sync(tmp_path / "journal", transport, bucket_mb=0.005), version)
    assert cast.generating() == {0: version, 1: version}
    assert not np.allclose(cast.engines.processes[0].call("answer")[1], before, rtol=0, atol=1e-2)
    check_log_probs_are_the_trainers(cast)
    width, heads, groups, inner, layers = 64, 64, 32, 256, 2
    adapters = layers * LORA.rank * ((width + heads) + 2 * (width + groups) + (heads + width) + 3 * (width + inner))
    if transport != "delta":  # whose records are compressed
        assert result.bytes == 4 * adapters
    assert result.bytes < sum(t.nbytes for t in load_file(tiny_model / "model.safetensors").values()) / 10


def test_an_engine_killed_in_mid_update_leaves_the_old_adapter(cast: Cast, tmp_path: Path) -> None:
    journal, version = tmp_path / "journal", cast.next_version()
    trained(cast, 1.0)
    publish(cast.sync(journal, "tensor", bucket_mb=0.005), version)
    before = cast.engines.processes[0].call("answer")
    trained(cast, 0.2)
    cast.engines.processes[1].arm("weights_receive", "kill", nth=2)
    with pytest.raises(UpdateAborted, match="engine 1 failed at weights_receive"):
        publish(cast.sync(journal, "tensor", bucket_mb=0.005), version + 1)
    assert cast.generating() == {0: version}
    assert cast.engines.processes[0].call("answer") == before
    cast.mend()


def test_a_manifest_that_is_not_the_engines_adapter_is_refused(cast: Cast, tmp_path: Path) -> None:
    specs = list(asyncio.run(cast.trainer.run_on_ranks(export_specs))[0])
    specs[0] = replace(specs[0], shape=(5, 64))
    with pytest.raises(Exception, match=r"tensor 'base_model\.model\..*' has shape \[5, 64\], the engine holds \[4, 64\]"):
        cast.engines.processes[0].call("weights_begin", plan(99, specs, 64))
