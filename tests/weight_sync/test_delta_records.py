"""What one rank writes and one engine reads of the delta transport's records, in a folder, without a process for either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from weight_sync.contracts import Bucket, FromStore, Manifest, TensorSpec, WeightSyncError
from weight_sync.transports.delta import DeltaReader
from weight_sync.transports.delta_transport import write_record

SPECS = tuple(TensorSpec(f"layer.{i}.weight", (20, 10), "bfloat16") for i in range(4))
MANIFEST = Manifest(version=1, buckets=(Bucket(0, SPECS[:2]), Bucket(1, SPECS[2:])))


class Weights:
    """A source on one rank. `taken`: names that were gathered."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.tensors = {spec.name: torch.randn(spec.shape, dtype=torch.bfloat16) for spec in SPECS}
        self.taken: list[str] = []

    def weight_specs(self) -> Sequence[TensorSpec]:
        return SPECS

    def weight_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            self.taken.append(name)
            yield name, self.tensors[name]


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_a_manifest_is_read_once_for_all_buckets_of_an_update(tmp_path: Path) -> None:
    weights, reader = Weights(), DeltaReader()
    written = write_record(weights, 0, str(tmp_path), MANIFEST, False)
    assert written is not None
    found = reader.read(MANIFEST.buckets[0], FromStore(str(tmp_path), written.record), {}.__getitem__)
    (tmp_path / "00000001" / "manifest.json").unlink()
    found |= reader.read(MANIFEST.buckets[1], FromStore(str(tmp_path), written.record), {}.__getitem__)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.tensors.items())


def test_records_of_weights_that_hardly_change_do_not_pile_up(tmp_path: Path) -> None:
    """Manifests count: what an engine that joins reads is bounded by two snapshots, however little changes."""
    weights, bytes_written = Weights(), []
    for _ in range(12):
        written = write_record(weights, 0, str(tmp_path), MANIFEST, False)
        assert written is not None
        bytes_written.append(written.nbytes)
        assert size(tmp_path) <= 2 * bytes_written[0] + min(bytes_written)
    assert bytes_written.count(bytes_written[0]) > 1


def test_where_the_store_cannot_be_opened_other_ranks_are_not_left_waiting() -> None:
    weights = Weights()
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        write_record(weights, 0, "nothing://here", MANIFEST, False)
    assert weights.taken == [spec.name for spec in SPECS]
