"""Reading a bucket out of a file that is mapped."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weight_sync.contracts import Bucket, SharedMemory, TensorSpec, WeightSyncError
from weight_sync.transports.shared_memory import read_bucket
from weight_sync.transports.tensor_transport import FOLDER, check_room

BUCKET = Bucket(3, (TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (5,), "float32"), TensorSpec("none", (0, 4), "float32")))


@pytest.fixture
def payload() -> Iterator[SharedMemory]:
    path = FOLDER / f"miles-test-{os.getpid()}"
    path.write_bytes(torch.arange(11, dtype=torch.float32).numpy().tobytes())
    yield SharedMemory(str(path), 44)
    path.unlink(missing_ok=True)


def test_tensors_lie_end_to_end_in_order(payload: SharedMemory) -> None:
    tensors = read_bucket(BUCKET, payload)
    assert tensors["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["b"].tolist() == [6, 7, 8, 9, 10]
    assert tensors["none"].shape == (0, 4)


def test_nothing_is_copied(payload: SharedMemory) -> None:
    tensors = read_bucket(BUCKET, payload)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(payload.path)]
    start, end = (int(edge, 16) for edge in mapped[0].split()[0].split("-"))
    assert start <= tensors["a"].data_ptr() < tensors["b"].data_ptr() < end


def test_views_outlive_the_files_name(payload: SharedMemory) -> None:
    tensors = read_bucket(BUCKET, payload)
    os.unlink(payload.path)
    assert tensors["b"].sum().item() == 40


def test_a_write_through_a_view_stays_in_this_process(payload: SharedMemory) -> None:
    read_bucket(BUCKET, payload)["a"].zero_()
    assert read_bucket(BUCKET, payload)["a"][1, 2].item() == 5


def test_a_missing_file_is_named(payload: SharedMemory) -> None:
    with pytest.raises(WeightSyncError, match="bucket 3: cannot open '/dev/shm/nowhere'"):
        read_bucket(BUCKET, SharedMemory("/dev/shm/nowhere", 44))


@pytest.mark.parametrize("length", [0, 40, 48])
def test_a_file_of_another_size_is_refused(payload: SharedMemory, length: int) -> None:
    Path(payload.path).write_bytes(bytes(length))
    with pytest.raises(WeightSyncError, match=f"needs 44 bytes.* has {length}"):
        read_bucket(BUCKET, payload)


def test_a_payload_that_claims_another_size_is_refused(payload: SharedMemory) -> None:
    with pytest.raises(WeightSyncError, match="its payload says 40"):
        read_bucket(BUCKET, SharedMemory(payload.path, 40))


def test_too_little_shared_memory_is_said_with_the_arithmetic() -> None:
    free = os.statvfs(FOLDER).f_bavail * os.statvfs(FOLDER).f_frsize
    with pytest.raises(WeightSyncError) as caught:
        check_room(None, 0, free + 3 * 2**20)  # type: ignore[arg-type]
    need, free_mib, size, lack = (float(word) for word in re.findall(r"\d+\.\d", str(caught.value)))
    assert need == pytest.approx(free / 2**20 + 3, abs=0.2)
    assert lack == pytest.approx(need - free_mib, abs=0.2)
    assert free_mib <= size


def test_an_update_that_fits_passes() -> None:
    free = os.statvfs(FOLDER).f_bavail * os.statvfs(FOLDER).f_frsize
    check_room(None, 0, free * 2 // 3)  # type: ignore[arg-type]


def test_only_rank_0_needs_room() -> None:
    check_room(None, 1, 2**60)  # type: ignore[arg-type]
