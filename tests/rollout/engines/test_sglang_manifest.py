"""The check of a manifest against a model directory, and of the server's checksums against what was sent."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout.engines.sglang_manifest import check_manifest, stored_shapes
from rollout.engines.sglang_served import check_served
from weight_sync.contracts import Bucket, Manifest, TensorSpec, WeightSyncError

SHAPES = {"a": (2, 3), "b": (4,), "lm_head.weight": (5, 2)}


def manifest(**changes: TensorSpec | None) -> Manifest:
    specs = {name: TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()} | changes
    return Manifest(2, (Bucket(0, tuple(spec for spec in specs.values() if spec is not None)),))


def check(manifest: Manifest, tied: bool = False) -> None:
    check_manifest(manifest, SHAPES, "float32", tied, "engine-1")


def test_names_and_shapes_come_from_every_file_of_the_directory(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "model-00002-of-00002.safetensors")
    assert stored_shapes(tmp_path) == {"a": (2, 3), "b": (4,)}


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="no safetensors file"):
        stored_shapes(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": TensorSpec("a", (3, 2), "float32")}, r"'a' has shape \[3, 2\], the engine holds \[2, 3\]"),
        ({"b": TensorSpec("b", (4,), "bfloat16")}, "'b' is bfloat16, the engine holds float32"),
        ({"c": TensorSpec("c", (1,), "float32")}, "'c' is not in the model"),
        ({"c": TensorSpec("b", (4,), "float32")}, "'b' comes twice"),
        ({"b": None}, "1 tensors are left out, the first is 'b'"),
        ({"lm_head.weight": None}, r"left out, the first is 'lm_head\.weight'"),
    ],
    ids=["shape", "dtype", "unknown", "twice", "left out", "untied head left out"],
)
def test_what_does_not_fit_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(WeightSyncError, match=f"engine-1 refuses version 2: .*{message}"):
        check(manifest(**change))


def test_a_tied_head_may_be_left_out() -> None:
    check(manifest(**{"lm_head.weight": None}), tied=True)


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
