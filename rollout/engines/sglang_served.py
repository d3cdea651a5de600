"""Compares the checksums that SGLang computes of its own parameters with those of the tensors that were sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from weight_sync.contracts import WeightSyncError

# SGLang fuses these projections by laying them end to end along the output dimension.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# SGLang pads the vocabulary to a multiple of this with rows of zeros.
VOCABULARY_TILE = 64


def check_served(answer: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], engine: str) -> int:
    """Returns how many of the server's tensors were compared.

    A server tensor that is neither one of ours nor a known fusion of them (experts, quantised weights) is left out.

    Raises:
        WeightSyncError: a checksum differs; the server does not hold what was sent.
    """
    compared = 0
    for name, checksum in answer["ranks"][0]["checksums"].items():
        parts = _parts(name, tensors)
        if not parts:
            continue
        if checksum not in set(_checksums(parts)):
            raise WeightSyncError(f"{engine}: the server's {name!r} is not made of the bytes that were sent")
        compared += 1
    return compared


def _parts(name: str, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    if name in tensors:
        return [tensors[name]]
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            names = [name.replace(fused, part) for part in parts]
            return [tensors[part] for part in names] if all(part in tensors for part in names) else []
    return []


def _checksums(parts: list[torch.Tensor]) -> Iterator[str]:
    """As the tensors are, and with rows of zeros up to the next full tile of the vocabulary."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    yield hasher.hexdigest()[:16]
    rows = -parts[0].shape[0] % VOCABULARY_TILE
    if len(parts) == 1 and parts[0].dim() == 2 and rows:
        hasher.update(bytes(rows * parts[0].shape[1] * parts[0].element_size()))
        yield hasher.hexdigest()[:16]
