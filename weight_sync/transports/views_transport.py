"""The `views` transport: engines on the trainer's machine read the trainer's own weights. Nothing is sent but what cannot be viewed.

The transaction around it is the same, with one difference: the bytes of a version are there before its update begins. An engine that was to
go back to the version before cannot, and says so when it is next asked for a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Sequence

from weight_sync.buckets import export_bytes
from weight_sync.contracts import Bucket, Home, HomedSource, InPlace, Manifest, SharedMemory, WeightSource, WeightSyncError
from weight_sync.digests import digest
from weight_sync.gather import skip_bucket
from weight_sync.layout import nbytes
from weight_sync.parties import Engines, Sent, Trainer, call_all, call_trainer
from weight_sync.transports.tensor_transport import FOLDER, check_room, remove_files, remove_local, write_bucket


class ViewsTransport:
    """The trainer's weights move into shared memory before the first update, and stay there.

    Args:
        prefix: of the files of what is copied.
    """

    def __init__(self, trainer: Trainer, engines: Engines, *, prefix: str, timeout_s: float) -> None:
        self._trainer, self._engines, self._prefix, self._timeout_s = trainer, engines, prefix, timeout_s
        self._engine_ids: tuple[int, ...] = ()
        self._attempt = 0

    async def setup(self, engine_ids: Sequence[int], manifest: Manifest) -> None:
        self._engine_ids = tuple(engine_ids)

    async def send(self, manifest: Manifest, digests: bool) -> Sent:
        self._attempt += 1
        home = await self._home()
        placed = {one.name: one for one in home.placed}
        rests = {bucket.index: rest for bucket in manifest.buckets if (rest := _without(bucket, placed)) is not None}
        sent = export_bytes(Manifest(manifest.version, tuple(rests.values()))) if rests else 0
        await call_trainer(self._trainer, self._timeout_s, check_room, sent)
        found: dict[str, str] = {}
        for bucket in manifest.buckets:
            copied: tuple[Bucket, SharedMemory] | None = None
            if (rest := rests.get(bucket.index)) is not None:
                file = SharedMemory(str(FOLDER / f"{self._prefix}-{manifest.version}-{self._attempt}-{bucket.index}"), nbytes(rest))
                await call_trainer(self._trainer, self._timeout_s, write_bucket, rest, file.path, None, False)
                copied = rest, file
            if digests:
                found |= (await call_trainer(self._trainer, self._timeout_s, digest_bucket, bucket))[0]
            own = tuple(placed[spec.name] for spec in bucket.tensors if spec.name in placed)
            payload = InPlace(home.path, home.nbytes, home.moves, own, copied)
            await call_all(self._engines, self._engine_ids, self._timeout_s, "weights_receive", bucket, payload)
        await call_trainer(self._trainer, self._timeout_s, remove_files, self._prefix)
        return Sent(found, sent)

    async def close(self) -> None:
        """Remove the files of what was copied. The weights stay where they are: they have no name that could be left behind."""
        remove_local(self._prefix)
        with contextlib.suppress(WeightSyncError):  # the trainer may be what failed
            await call_trainer(self._trainer, self._timeout_s, remove_files, self._prefix)

    async def _home(self) -> Home:
        first = (await call_trainer(self._trainer, self._timeout_s, make_home))[0]
        assert first is not None
        homes = await call_trainer(self._trainer, self._timeout_s, move_home, first.path)
        return homes[0]


def make_home(backend: HomedSource, rank: int) -> Home | None:
    """Rank 0's memory for the weights of all ranks, made where it is not there yet."""
    return backend.weight_home(None) if rank == 0 else None


def move_home(backend: HomedSource, rank: int, path: str) -> Home:
    """This rank's part moves into it, where it has not yet."""
    return backend.weight_home(path)


def digest_bucket(backend: WeightSource, rank: int, bucket: Bucket) -> dict[str, str]:
    """xxh3 of every tensor as it is gathered, by name; rank 0's. Collective."""
    if rank != 0:
        skip_bucket(backend, bucket)
        return {}
    return {name: digest(tensor) for name, tensor in backend.weight_tensors([spec.name for spec in bucket.tensors])}


def _without(bucket: Bucket, placed: Container[str]) -> Bucket | None:
    rest = tuple(spec for spec in bucket.tensors if spec.name not in placed)
    return Bucket(bucket.index, rest) if rest else None
