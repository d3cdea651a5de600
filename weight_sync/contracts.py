"""What an engine receives, what a trainer offers, and what a transport does between them.

One update is one transaction, driven by `weight_sync/transaction.py`:

    begin(version, manifest)  on every engine   the engine prepares to receive; it may pause
    send / receive(bucket)    per bucket        the transport moves bytes; torch engines stage them, SGLang loads in place
    prepared() -> digests     on every engine   compared with the trainer's own
    ---- the driver journals `version` ----
    commit(version)           on every engine   serves `version` from the next token on
    abort(version)            instead, on any failure before the journal entry: every engine is back on its old version

Engines serve version v until commit and v+1 after it, never a mixture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from weight_sync.slices import Slice


class WeightSyncError(RuntimeError):
    """An update was refused or failed. The message names tensor, engine and versions."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as the Hugging Face checkpoint names it. `dtype` is torch's name without the prefix, e.g. `float32`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype that travel together, flattened and laid end to end in the order of `tensors`."""

    index: int
    tensors: tuple[TensorSpec, ...]

    @property
    def dtype(self) -> str:
        return self.tensors[0].dtype

    @property
    def numel(self) -> int:
        return sum(t.numel for t in self.tensors)


@dataclass(frozen=True)
class Manifest:
    """Everything an engine must know before the first byte: the version, and the buckets in the order they will come.

    Tied tensors appear once, under the name that the checkpoint stores. Engines refuse a manifest with a name, shape or
    dtype that is not theirs, and one that leaves out a tensor they hold.
    """

    version: int
    buckets: tuple[Bucket, ...]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(t for b in self.buckets for t in b.tensors)


@dataclass(frozen=True)
class SharedMemory:
    """Payload of the `tensor` transport: the bucket's bytes, flattened in `bucket.tensors` order, in a file under /dev/shm."""

    path: str
    nbytes: int


@dataclass(frozen=True)
class FromGroup:
    """Payload of the `broadcast` transport: the bytes come through the process group joined by `weights_join`, from rank 0."""


@dataclass(frozen=True)
class RecordId:
    """A record of the `delta` transport's store: its number there, and xxh3 of its manifest, by which no other is taken for it."""

    number: int
    xxh3: str


@dataclass(frozen=True)
class FromStore:
    """Payload of the `delta` transport: `record` of the store at `url` has the bucket's bytes, or how they changed."""

    url: str
    record: RecordId


@dataclass(frozen=True)
class Source:
    """A trainer rank's memory: the transfer engine's name and description of the process, and where its outgoing bytes begin there."""

    name: str
    agent: bytes
    address: int


@dataclass(frozen=True)
class Read:
    """`piece` lies `offset` bytes behind the address of `sources[source]`, its elements in row-major order."""

    source: int
    offset: int
    piece: Slice


@dataclass(frozen=True)
class FromShards:
    """Payload of the `p2p` transport: what to read of the bucket, and where. Each read is the engine's, from the trainer's memory.

    Attributes:
        loopback: all is on one machine, and no other interface is to be used. timeout_s: of the whole bucket."""

    sources: tuple[Source, ...]
    reads: tuple[Read, ...]
    loopback: bool
    timeout_s: float


@dataclass(frozen=True)
class Placed:
    """A tensor of the export inside a larger buffer: offset and strides, in elements of its dtype."""

    name: str
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True)
class InPlace:
    """Payload of the `views` transport: the trainer's own weights, in memory that it shares.

    Attributes:
        path, nbytes: of that memory, as a file. Its first word counts how often the trainer was about to change it, which was `moves` times
            when this was sent.
        placed: tensors of the bucket that lie there. rest: the bucket's others and their bytes, copied.
    """

    path: str
    nbytes: int
    moves: int
    placed: tuple[Placed, ...]
    rest: tuple[Bucket, SharedMemory] | None


Payload = SharedMemory | FromGroup | FromStore | FromShards | InPlace


@dataclass(frozen=True)
class GroupSpec:
    """A process group of trainer rank 0 (rank 0) and every engine, one member each. `backend` is gloo or nccl."""

    address: str
    port: int
    world_size: int
    name: str
    backend: str
    timeout_s: float


class WeightReceiver(Protocol):
    """The engine's side, in the engine's own process (torch) or in the process that talks to its server (SGLang)."""

    def weights_version(self) -> int:
        """The version being served."""
        ...

    def weights_join(self, group: GroupSpec, rank: int) -> None:
        """Join the process group (broadcast only), in place of one joined before. Blocks until every member is there, or raises
        WeightSyncError at the deadline."""
        ...

    def weights_begin(self, manifest: Manifest) -> None:
        """Check the manifest against the model and get ready. Raises WeightSyncError naming the first tensor that does not fit."""
        ...

    def weights_receive(self, bucket: Bucket, payload: Payload) -> None:
        """Take one bucket: staged beside the served weights (torch) or loaded in place with the old ones retained (SGLang)."""
        ...

    def weights_prepared(self, digests: bool) -> dict[str, str]:
        """All buckets are here. With `digests`, xxh3 of every received tensor's bytes by name (`FromShards`: of every piece, see `Slice.of`),
        else {}."""
        ...

    def weights_commit(self, version: int) -> None:
        """Serve `version`. Idempotent. The KV cache of older weights is dropped or kept as the pause mode said.

        Raises WeightSyncError when `version` is neither served already nor prepared: an engine that was replaced has to catch up."""
        ...

    def weights_abort(self) -> None:
        """Back to the version served before `weights_begin`, generating again. Idempotent.

        It also leaves the group joined by `weights_join`: a broadcast that broke off cannot go on, and leaving is what frees
        the members that still wait in it."""
        ...


class WeightSource(Protocol):
    """The trainer's side: what a backend offers. Full tensors are gathered, so every rank of the trainer asks for them in step; slices
    are a rank's own."""

    def weight_specs(self) -> Sequence[TensorSpec]:
        """Names, shapes and dtypes of the export, equal on every rank; tied tensors once."""
        ...

    def weight_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors, in the order of `names`, gathered one at a time. Collective; only rank 0 gets data, others empty tensors."""
        ...

    def weight_slices(self) -> Sequence[Slice]:
        """What this rank holds of the export, adapters apart. Over all ranks, slices of one tensor are equal or disjoint.

        Raises ValueError where the checkpoint's tensors are no rectangles of those in memory."""
        ...

    def weight_slice(self, piece: Slice) -> torch.Tensor:
        """`piece`, part of one of `weight_slices`, of the checkpoint's shape and in its dtype. Not collective; may be a view on a parameter."""
        ...


class HomedSource(WeightSource, Protocol):
    """A source whose weights can lie in memory that it shares with engines."""

    def weight_home(self, path: str | None) -> Home:
        """Move what this rank holds of the export into the file at `path`, where it stays; rank 0 makes that file, where it is given None. Once
        moved, every call says where. Raises ValueError where the checkpoint's tensors are no rectangles of those in memory."""
        ...


@dataclass(frozen=True)
class Home:
    """`path`, `nbytes`, `moves`: as in `InPlace`. placed: what engines may view there; every other tensor has to be sent."""

    path: str
    nbytes: int
    moves: int
    placed: tuple[Placed, ...]
