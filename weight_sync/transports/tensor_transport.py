"""The `tensor` transport: trainer and engines on one machine share each bucket as a file under /dev/shm."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from weight_sync.buckets import export_bytes
from weight_sync.contracts import Bucket, Manifest, SharedMemory, WeightSource, WeightSyncError
from weight_sync.gather import gather_bucket
from weight_sync.layout import nbytes, torch_dtype, views
from weight_sync.parties import Engines, Sent, Trainer, call_all, call_trainer, until_first_failure

FOLDER = Path("/dev/shm")


class TensorTransport:
    """While the engines take bucket i, the trainer gathers bucket i+1; then the file of bucket i goes.

    An engine keeps a bucket, by a view (torch) or a hard link (SGLang), and with it its memory, until it has the next version: the room for
    a whole export is checked first.
    """

    def __init__(self, trainer: Trainer, engines: Engines, *, prefix: str, timeout_s: float) -> None:
        self._trainer = trainer
        self._engines = engines
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._engine_ids: tuple[int, ...] = ()
        self._writing: asyncio.Task[list[Any]] | None = None
        self._clean = False
        self._attempt = 0

    async def setup(self, engine_ids: Sequence[int], manifest: Manifest) -> None:
        self._engine_ids = tuple(engine_ids)
        if not self._clean:
            # What an earlier driver or rank of this run left behind when it died.
            await call_trainer(self._trainer, self._timeout_s, remove_files, self._prefix)
            self._clean = True

    async def send(self, manifest: Manifest, digests: bool) -> Sent:
        self._clean = False
        self._attempt += 1  # no file name twice: an engine that is late with an earlier attempt must not find this one's bytes
        await call_trainer(self._trainer, self._timeout_s, check_room, export_bytes(manifest))
        found: dict[str, str] = {}
        receiving: list[asyncio.Task[Any]] = []
        received = present = None
        try:
            for bucket in manifest.buckets:
                payload = SharedMemory(str(FOLDER / f"{self._prefix}-{manifest.version}-{self._attempt}-{bucket.index}"), nbytes(bucket))
                self._writing = asyncio.ensure_future(call_trainer(self._trainer, self._timeout_s, write_bucket, bucket, payload.path, received, digests))
                await until_first_failure([*receiving, self._writing])
                found |= self._writing.result()[0]
                received, present = present, payload.path
                receiving = [asyncio.ensure_future(call_all(self._engines, self._engine_ids, self._timeout_s, "weights_receive", bucket, payload))]
            await until_first_failure(receiving)
        finally:
            for task in receiving:
                task.cancel()
        await call_trainer(self._trainer, self._timeout_s, remove_files, self._prefix)
        self._clean = True
        return Sent(found, export_bytes(manifest))

    async def close(self) -> None:
        """Remove the files: through the trainer, and from here as well, which is the same machine unless the driver stands apart."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=self._timeout_s)
            self._writing = None
        remove_local(self._prefix)
        with contextlib.suppress(WeightSyncError):  # the trainer may be what failed
            await call_trainer(self._trainer, self._timeout_s, remove_files, self._prefix)
            self._clean = True


def check_room(backend: WeightSource, rank: int, need: int) -> None:
    """Refuse an update of `need` bytes that do not fit /dev/shm, before the first byte is written."""
    if rank != 0:
        return
    state = os.statvfs(FOLDER)
    free, size = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    if need > free:
        raise WeightSyncError(
            f"weight_sync.transport = 'tensor' needs {need / 2**20:.1f} MiB in {FOLDER} for the weights of an update, but "
            f"{free / 2**20:.1f} of its {size / 2**20:.1f} MiB are free, {(need - free) / 2**20:.1f} too few: enlarge it (docker run --shm-size=...), "
            "or set weight_sync.transport = 'broadcast'"
        )


def write_bucket(backend: WeightSource, rank: int, bucket: Bucket, path: str, received: str | None, digests: bool) -> dict[str, str]:
    """Gather one bucket straight into the file `path`, in place of the file `received`, which every engine has taken by now.
    Collective; rank 0 writes and returns the digests."""
    if rank == 0 and received is not None:
        Path(received).unlink(missing_ok=True)
    return gather_bucket(backend, rank, bucket, lambda: _create(bucket, path), digests)


def remove_files(backend: WeightSource, rank: int, prefix: str) -> None:
    """Rank 0 removes every bucket file of this run on its machine."""
    if rank == 0:
        remove_local(prefix)


def remove_local(prefix: str) -> None:
    for path in FOLDER.glob(f"{prefix}-*"):
        path.unlink(missing_ok=True)


def _create(bucket: Bucket, path: str) -> dict[str, torch.Tensor]:
    """A new file of the bucket's size as views. Its blocks are reserved first: writing to a mapping of a full /dev/shm kills the process."""
    size = nbytes(bucket)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise WeightSyncError(f"bucket {bucket.index}: cannot reserve {size} bytes at {path!r}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if not size:
        return views(torch.empty(0, dtype=torch_dtype(bucket)), bucket)
    return views(torch.from_file(path, shared=True, size=bucket.numel, dtype=torch_dtype(bucket)), bucket)
