"""How changes are written down: everything comes back, and nothing that is not right is taken for it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.transports.delta_codec import decode, encode


def as_bytes(values: list[int], itemsize: int) -> np.ndarray:
    return np.array(values, f"u{itemsize}").view(np.uint8)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 200))
def test_new_bytes_come_back_whatever_changed(data: st.DataObject, itemsize: int, numel: int) -> None:
    element = st.integers(0, 2 ** (8 * itemsize) - 1)
    old = data.draw(st.lists(element, min_size=numel, max_size=numel))
    changes = data.draw(st.dictionaries(st.integers(0, max(numel - 1, 0)), element)) if numel else {}
    new = [changes.get(place, value) for place, value in enumerate(old)]
    for base in (as_bytes(old, itemsize), None):
        encoding, blob = encode(as_bytes(new, itemsize), base, itemsize)
        assert decode(encoding, blob, base, numel, itemsize).tolist() == as_bytes(new, itemsize).tolist()


def test_an_unchanged_tensor_takes_no_byte() -> None:
    flat = as_bytes([3, 1, 4, 1, 5], 2)
    assert encode(flat, flat, 2) == ("sparse", b"")


def test_one_change_in_a_hundred_thousand_takes_a_few_bytes() -> None:
    old = np.zeros(100_000, np.uint16)
    new = old.copy()
    new[77_777] = 9
    encoding, blob = encode(new.view(np.uint8), old.view(np.uint8), 2)
    assert encoding == "sparse"
    assert len(blob) < 32


@pytest.mark.parametrize("encoding", ["sparse", "dense"])
def test_bytes_of_another_size_are_refused(encoding: str) -> None:
    rng = np.random.default_rng(0)
    old = rng.integers(0, 2**16, 400, np.uint16)
    new = old.copy()
    new[: 400 if encoding == "dense" else 7] ^= 5
    made, blob = encode(new.view(np.uint8), old.view(np.uint8), 2)
    assert made == encoding
    with pytest.raises(ValueError, match=r"unpacks|elements|change at element"):
        decode(made, blob, old[:3].view(np.uint8), 3, 2)


def test_bytes_that_are_no_archive_are_refused() -> None:
    with pytest.raises(ValueError, match=r"does not unpack|unpacks to"):
        decode("dense", b"not zstd", None, 4, 2)
