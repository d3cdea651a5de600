"""What every test shares: the environment that must stand before torch is imported, and the costly things made once a session."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from miles.core.environment import set_defaults  # noqa: E402

set_defaults(threads=1)
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that needs the network is wrong
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Ray workers and engine processes import this checkout.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

if TYPE_CHECKING:
    from rollout.engines.sglang_engine import SGLangEngine

TINY_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 +-=.,:?"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a random Qwen3 of 0.15M parameters, context 256. Read-only: every test shares it."""
    from miles.core.model.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", alphabet=TINY_ALPHABET, context=256)


@pytest.fixture(scope="session")
def sglang_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """The session's one SGLang server, on `tiny_model`. A start costs 15-40 s, so share it: leave it generating, at any version."""
    from miles.core.model.config import ModelConfig
    from rollout.config import RolloutConfig
    from rollout.engines.sglang_engine import SGLangEngine

    engine = SGLangEngine(
        ModelConfig(path=str(tiny_model)), RolloutConfig(engine="sglang", max_running=32, timeout_s=60), log_folder=tmp_path_factory.mktemp("sglang")
    )
    try:
        asyncio.run(engine.start())
        yield engine
    finally:
        asyncio.run(engine.close())


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for the session: 8 logical CPUs, a small object store, no dashboard."""
    import ray

    ray.init(num_cpus=8, object_store_memory=150 * 1024 * 1024, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
