"""The `delta` transport's store: records of weights under any path that fsspec knows (a folder, s3://, gs://).

    ROOT/00000007/manifest.json      which record this is based on, and each tensor's place, encoding and digest
    ROOT/00000007/bucket-0 ...       the encoded tensors of one bucket, one after another

A record holds all weights at one moment, as changes against the record before it, or in full (a snapshot). Records are numbered by
attempt and not by weight version: one whose update was aborted is a link of the chain like any other. A record is referred to by its
number and its manifest's digest, and a manifest has the digests of everything else, so a torn or stale file is never taken for the
right one, and nothing has to be renamed into place. Digests find damage, not malice: whoever may write to the store may change weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import fsspec
import xxhash

from weight_sync.contracts import Bucket, RecordId, TensorSpec, WeightSyncError
from weight_sync.transports.delta_codec import Encoding


class BrokenChain(WeightSyncError):
    """A record, or one that it is based on, is missing, damaged or not what it says: a snapshot mends that."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a bucket file: `nbytes` encoded bytes, which decode to a tensor whose bytes have the digest `xxh3`."""

    spec: TensorSpec
    encoding: Encoding
    nbytes: int
    xxh3: str


@dataclass(frozen=True)
class Record:
    """What a manifest says. `base` is None for a snapshot; `entries` are by bucket; `files` are the bucket files' digests."""

    version: int
    base: RecordId | None
    entries: tuple[tuple[Entry, ...], ...]
    files: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entries in self.entries for entry in entries)

    def covers(self, bucket: Bucket) -> bool:
        """Whether this record's bucket of that number has the same tensors."""
        return bucket.index < len(self.entries) and tuple(e.spec for e in self.entries[bucket.index]) == bucket.tensors


class WeightStore:
    """Reads and writes records under `url`."""

    def __init__(self, url: str) -> None:
        """Raises WeightSyncError where fsspec has no such file system or lacks the package for it."""
        self.url = url
        self._records: dict[RecordId, Record] = {}
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise WeightSyncError(f"weight_sync.store = {url!r} cannot be opened: {error}") from error

    def numbers(self) -> list[int]:
        """Numbers of the records that are there, whole or not, in order. Raises WeightSyncError where a file is in the store's place."""
        if not self._files.exists(self._root):
            return []
        if self._files.isfile(self._root):
            raise WeightSyncError(f"weight_sync.store = {self.url!r} is a file: name a folder")
        self._files.invalidate_cache(self._root)
        names = [path.rstrip("/").rsplit("/", 1)[-1] for path in self._files.ls(self._root, detail=False)]
        return sorted(int(name) for name in names if name.isdigit())

    def write_bucket(self, number: int, index: int, content: bytes) -> str:
        """Write a bucket's encoded tensors; returns the file's digest."""
        self._write(f"{number:08}/bucket-{index}", content)
        return xxhash.xxh3_64_hexdigest(content)

    def write_manifest(self, number: int, record: Record) -> tuple[RecordId, int]:
        """Write the manifest, after which the record is whole; also returns the manifest's bytes."""
        content = json.dumps(asdict(record)).encode()
        self._write(f"{number:08}/manifest.json", content)
        return RecordId(number, xxhash.xxh3_64_hexdigest(content)), len(content)

    def record(self, record_id: RecordId) -> Record:
        """Its manifest is read once. Raises BrokenChain when it is not there or is another one."""
        if record_id not in self._records:
            self._records[record_id] = _parse(self._read(f"{record_id.number:08}/manifest.json", record_id.xxh3))
        return self._records[record_id]

    def bucket(self, number: int, record: Record, index: int) -> list[bytes]:
        """Each tensor's encoded bytes. Raises BrokenChain when the file is not there or has other bytes than the manifest says."""
        content = self._read(f"{number:08}/bucket-{index}", record.files[index])
        blobs, start = [], 0
        for entry in record.entries[index]:
            blobs.append(content[start : start + entry.nbytes])
            start += entry.nbytes
        return blobs

    def remove(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._files.rm(f"{self._root}/{number:08}", recursive=True)

    def _write(self, name: str, content: bytes) -> None:
        path = f"{self._root}/{name}"
        try:
            self._files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            self._files.pipe_file(path, content)
        except OSError as error:
            raise WeightSyncError(f"cannot write {name} to weight_sync.store = {self.url!r}: {error}") from error

    def _read(self, name: str, xxh3: str) -> bytes:
        try:
            content: bytes = self._files.cat_file(f"{self._root}/{name}")
        except OSError as error:
            raise BrokenChain(f"cannot read {name} of weight_sync.store = {self.url!r}, which trainer and engines must share: {error}") from error
        found = xxhash.xxh3_64_hexdigest(content)
        if found != xxh3:
            raise BrokenChain(f"{name} of weight_sync.store = {self.url!r} has digest {found}, not {xxh3}: it is damaged, incomplete or another run's")
        return content


def _parse(content: bytes) -> Record:
    fields = json.loads(content)
    entries = tuple(
        tuple(Entry(TensorSpec(e["spec"]["name"], tuple(e["spec"]["shape"]), e["spec"]["dtype"]), e["encoding"], e["nbytes"], e["xxh3"]) for e in bucket)
        for bucket in fields["entries"]
    )
    base = None if fields["base"] is None else RecordId(**fields["base"])
    return Record(fields["version"], base, entries, tuple(fields["files"]))
