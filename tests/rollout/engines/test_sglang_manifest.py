"""What a model directory says that a server holds, and the server's checksums against what was sent."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout.engines.sglang_manifest import stored_specs
from rollout.engines.sglang_served import check_served
from weight_sync.contracts import TensorSpec, WeightSyncError


def test_names_and_shapes_come_from_every_file_of_the_directory(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "model-00002-of-00002.safetensors")
    assert stored_specs(tmp_path, "float32") == {"a": TensorSpec("a", (2, 3), "float32"), "b": TensorSpec("b", (4,), "float32")}


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="no safetensors file"):
        stored_specs(tmp_path, "float32")


def sha(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]


def served(**checksums: str) -> dict:
    return {"ranks": [{"checksums": checksums}]}


TENSORS = {f"l.{name}.weight": torch.randn(4, 3) for name in ("q_proj", "k_proj", "v_proj", "o_proj")} | {"embed": torch.randn(10, 3)}
FUSED = [TENSORS[f"l.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")]


def test_fused_and_padded_tensors_are_compared() -> None:
    padded = torch.cat([TENSORS["embed"], torch.zeros(54, 3)])
    checksums = {"l.qkv_proj.weight": sha(*FUSED), "l.o_proj.weight": sha(TENSORS["l.o_proj.weight"]), "embed": sha(padded), "experts.w13": "?"}
    assert check_served(served(**checksums), TENSORS, "engine-1") == 3


@pytest.mark.parametrize("wrong", [FUSED[:2], [FUSED[1], FUSED[0], FUSED[2]]], ids=["a part is missing", "another order"])
def test_a_server_that_holds_other_bytes_is_named(wrong: list[torch.Tensor]) -> None:
    with pytest.raises(WeightSyncError, match=r"engine-1: the server's 'l\.qkv_proj\.weight'"):
        check_served(served(**{"l.qkv_proj.weight": sha(*wrong)}), TENSORS, "engine-1")
