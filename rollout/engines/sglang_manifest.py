"""Checks a manifest against the model directory before any byte is loaded: a payload that does not fit kills an SGLang server."""

from __future__ import annotations

import json
from pathlib import Path

from weight_sync.contracts import Manifest, WeightSyncError

TIED_HEAD = "lm_head.weight"


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the directory's safetensors files, from their headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightSyncError(f"{folder} has no safetensors file, so the names and shapes that the engine holds are unknown; save the model with safetensors")
    for path in files:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
    return shapes


def check_manifest(manifest: Manifest, shapes: dict[str, tuple[int, ...]], dtype: str, tied: bool, engine: str) -> None:
    """Raises WeightSyncError naming the first tensor whose name, shape or dtype is not the engine's, that comes twice or lacks."""
    prefix = f"{engine} refuses version {manifest.version}:"
    seen: set[str] = set()
    for spec in manifest.tensors:
        if spec.name not in shapes:
            raise WeightSyncError(f"{prefix} tensor {spec.name!r} is not in the model")
        if spec.shape != shapes[spec.name]:
            raise WeightSyncError(f"{prefix} tensor {spec.name!r} has shape {list(spec.shape)}, the engine holds {list(shapes[spec.name])}")
        if spec.dtype != dtype:
            raise WeightSyncError(f"{prefix} tensor {spec.name!r} is {spec.dtype}, the engine holds {dtype} (model.dtype)")
        if spec.name in seen:
            raise WeightSyncError(f"{prefix} tensor {spec.name!r} comes twice")
        seen.add(spec.name)
    missing = shapes.keys() - seen - ({TIED_HEAD} if tied else set())
    if missing:
        raise WeightSyncError(f"{prefix} {len(missing)} tensors are left out, the first is {min(missing)!r}")
