"""What an engine refuses before any byte moves."""

from __future__ import annotations

import pytest

from weight_sync.contracts import Bucket, Manifest, TensorSpec, WeightSyncError
from weight_sync.manifest import check_manifest

SHAPES = {"a": (2, 3), "b": (4,), "lm_head.weight": (5, 2)}


def manifest(**changes: TensorSpec | None) -> Manifest:
    specs = {name: TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()} | changes
    return Manifest(2, (Bucket(0, tuple(spec for spec in specs.values() if spec is not None)),))


def check(manifest: Manifest, may_lack: tuple[str, ...] = ()) -> None:
    check_manifest(manifest, {name: TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()}, "engine-1", may_lack)


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
    check(manifest(**{"lm_head.weight": None}), may_lack=("lm_head.weight",))
