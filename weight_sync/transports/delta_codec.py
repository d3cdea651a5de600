"""How one tensor's new bytes are written down against its old ones.

After an update with a small step most bfloat16 weights round to what they were. Elements are compared as unsigned integers of their own
size, and what is kept is their exclusive or with the old value:

- `sparse`: the gaps between the places that changed, and their values. For a few changes.
- `dense`: every value. Without an old value it is the new one itself: a snapshot.

Before compression (zstd) integers are laid out by significance, all first bytes, then all second bytes: high bytes are mostly zero in
an exclusive or, and mostly alike in the weights themselves.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

Encoding = Literal["sparse", "dense"]
LEVEL = 1
SPARSE_BELOW = 1 / 8  # share of changed elements; above it the gaps cost more than the zeros between them


def encode(new: NDArray[np.uint8], old: NDArray[np.uint8] | None, itemsize: int) -> tuple[Encoding, bytes]:
    """`new` [numel * itemsize] bytes against `old`, of the same size, or None for a snapshot. An unchanged tensor is `("sparse", b"")`.

    Example: new [1, 0, 7, 0] and old [1, 0, 5, 0] as uint16 have one change, at a gap of 2, of value 7 ^ 5 = 2.
    """
    if old is None:
        return "dense", _compress(_planes(_integers(new, itemsize)))
    different = _integers(new, itemsize) ^ _integers(old, itemsize)
    places = np.flatnonzero(different)
    if len(places) >= SPARSE_BELOW * len(different):
        return "dense", _compress(_planes(different))
    if not len(places):
        return "sparse", b""
    gaps = np.diff(places, prepend=-1) - 1
    if gaps.max() >= 2**32:
        raise ValueError(f"a tensor has {int(gaps.max())} unchanged elements in a row; gaps are written in 32 bits")
    return "sparse", _compress(_planes(gaps.astype(np.uint32)) + _planes(different[places]))


def decode(encoding: Encoding, blob: bytes, old: NDArray[np.uint8] | None, numel: int, itemsize: int) -> NDArray[np.uint8]:
    """What `encode` was given as `new`, as bytes [numel * itemsize] of the caller's own.

    Raises:
        ValueError: `blob` is not what `encode` makes of a tensor of this size.
    """
    if encoding == "dense":
        values = _from_planes(_decompress(blob, numel * itemsize), itemsize)
        if len(values) != numel:
            raise ValueError(f"{len(values)} elements where {numel} were expected")
        return (values if old is None else values ^ _integers(old, itemsize)).view(np.uint8)
    if old is None:
        raise ValueError("changes without the bytes they were made against")
    values = _integers(old, itemsize).copy()
    if blob:
        plain = _decompress(blob, numel * (4 + itemsize))
        changes, rest = divmod(len(plain), 4 + itemsize)
        if rest:
            raise ValueError(f"{len(plain)} bytes are not changes of {4 + itemsize} bytes each")
        places = np.cumsum(_from_planes(plain[: 4 * changes], 4).astype(np.int64) + 1) - 1
        if changes and places[-1] >= numel:
            raise ValueError(f"a change at element {int(places[-1])} of {numel}")
        values[places] ^= _from_planes(plain[4 * changes :], itemsize)
    return values.view(np.uint8)


def _integers(flat: NDArray[np.uint8], itemsize: int) -> NDArray[Any]:
    return flat.view(f"u{itemsize}")


def _planes(values: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T).tobytes()


def _from_planes(plain: bytes, itemsize: int) -> NDArray[Any]:
    planes = np.frombuffer(plain, np.uint8).reshape(itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(f"u{itemsize}")


def _compress(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(plain)


def _decompress(blob: bytes, most: int) -> bytes:
    try:
        size = zstandard.frame_content_size(blob)
        if not 0 <= size <= most:
            raise ValueError(f"it says that it unpacks to {size} bytes; at most {most} are right")
        return zstandard.ZstdDecompressor().decompress(blob)
    except zstandard.ZstdError as error:
        raise ValueError(f"it does not unpack: {error}") from error
