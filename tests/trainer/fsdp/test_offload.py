"""With `trainer.offload` weights, gradients and optimizer lie in CPU memory. What a GPU does with them has not been measured; that nothing changes has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.trainer_cases import make_backend, mixed_groups, small_model, weights
from trainer.config import TrainerConfig

pytestmark = pytest.mark.usefixtures("one_rank")


def test_offload_changes_no_bit(tmp_path: Path) -> None:
    model = small_model(tmp_path)
    kept, offloaded = (make_backend(model, dtype=torch.float32, trainer={"offload": offload, "clip_norm": 0.01}) for offload in (False, True))
    assert isinstance(offloaded.model, FSDPModule)
    for _ in range(2):
        assert offloaded.step_rl(mixed_groups()).metrics == kept.step_rl(mixed_groups()).metrics
    found, expected = weights(offloaded), weights(kept)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_megatron_has_no_offload() -> None:
    with pytest.raises(ValueError, match=r"trainer.offload = true is for trainer.backend = 'fsdp'"):
        TrainerConfig(backend="megatron", offload=True)
