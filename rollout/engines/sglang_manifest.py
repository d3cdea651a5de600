"""What an SGLang server holds, by its model directory: a payload that does not fit would kill it, so it is checked before."""

from __future__ import annotations

import json
from pathlib import Path

from weight_sync.contracts import TensorSpec, WeightSyncError

TIED_HEAD = "lm_head.weight"


def stored_specs(folder: Path, dtype: str) -> dict[str, TensorSpec]:
    """Every tensor in the directory's safetensors files, from their headers alone; the server loads them all as `dtype`."""
    specs: dict[str, TensorSpec] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightSyncError(f"{folder} has no safetensors file, so the names and shapes that the engine holds are unknown; save the model with safetensors")
    for path in files:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        specs |= {name: TensorSpec(name, tuple(entry["shape"]), dtype) for name, entry in header.items()}
    return specs
