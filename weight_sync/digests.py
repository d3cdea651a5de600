"""A fingerprint of a tensor's bytes, to compare what was sent with what arrived."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash


def digest(tensor: torch.Tensor) -> str:
    """xxh3 (64 bit, 16 hex digits) of the elements in row-major order, whatever the strides, dtype or device.

    Shape and dtype are not part of it: the manifest fixes those.
    """
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    # numpy declares the buffer protocol to type checkers from Python 3.12 on only.
    return xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def fingerprint(digests: Mapping[str, str]) -> str:
    """One digest of a whole export: of names and tensor digests, in name order."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return xxhash.xxh3_64_hexdigest(lines.encode())
