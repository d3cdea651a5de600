"""Fingerprints of bytes."""

import pytest
import torch
import xxhash

from weight_sync.digests import digest, fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool], ids=str)
def test_digest_is_xxh3_of_the_bytes(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (3, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert digest(tensor) == xxhash.xxh3_64(bytes(tensor.untyped_storage())).hexdigest()


def test_strides_do_not_matter() -> None:
    tensor = torch.randn(4, 6)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)


def test_one_bit_matters() -> None:
    tensor = torch.zeros(1000)
    flipped = tensor.clone()
    flipped.view(torch.int32)[777] = 1
    assert digest(flipped) != digest(tensor)


def test_minus_zero_is_not_zero() -> None:
    assert digest(torch.tensor([-0.0])) != digest(torch.tensor([0.0]))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)], ids=str)
def test_scalars_and_empty_tensors_have_digests(shape: tuple[int, ...]) -> None:
    assert len(digest(torch.zeros(shape))) == 16


def test_fingerprint_does_not_depend_on_order() -> None:
    assert fingerprint({"a": "1", "b": "2"}) == fingerprint({"b": "2", "a": "1"})


def test_fingerprint_knows_which_tensor_has_which_bytes() -> None:
    assert fingerprint({"a": "1", "b": "2"}) != fingerprint({"a": "2", "b": "1"})
