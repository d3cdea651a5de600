"""A weight transaction into a running SGLang server, which loads in place.

What is needed to go back is retained: the files of the last committed export (for the first version, the model directory). A
file of the `tensor` transport is shared with the sender by a hard link, so all engines of a machine retain one copy together;
what came by `broadcast`, `p2p` or `delta` is one copy for each engine. Both lie in the engine's folder under /dev/shm.

The process that talks to the server is the member of the broadcast group, not the server: a sender that dies then leaves the
server free to go back to its old weights, and the received bytes are at hand to be retained.
"""

from __future__ import annotations

import base64
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rollout.engines.sglang_args import LOADER
from rollout.engines.sglang_loader import describe
from rollout.engines.sglang_manifest import TIED_HEAD, stored_specs
from rollout.engines.sglang_served import check_served
from rollout.engines.sglang_server import SGLangServer
from weight_sync.buckets import export_bytes
from weight_sync.contracts import Bucket, FromShards, FromStore, Manifest, Payload, SharedMemory, TensorSpec, WeightSyncError
from weight_sync.layout import nbytes
from weight_sync.manifest import check_manifest
from weight_sync.slices import Slice
from weight_sync.transports.broadcast import Membership
from weight_sync.transports.delta import DeltaReader
from weight_sync.transports.p2p import ShardReader, piece_digests, received
from weight_sync.transports.shared_memory import read_bucket

if TYPE_CHECKING:
    from rollout.engines.sglang_args import ModelFacts

Stored = list[tuple[Bucket, SharedMemory]]


class SGLangWeights:
    """The server's weights: the version it serves, what is retained to go back to, and the update under way."""

    def __init__(self, server: SGLangServer, facts: ModelFacts, dtype: str, ranks: int, version: int) -> None:
        self.version = version
        self.commits = 0
        self._server = server
        self._facts = facts
        self._dtype = dtype
        self._ranks = ranks
        self._loader = LOADER
        self._specs: dict[str, TensorSpec] | None = None
        self._membership = Membership(server.name)
        self.join, self.leave = self._membership.join, self._membership.leave
        self._delta = DeltaReader()
        self._shards = ShardReader(server.name)
        self._pieces: dict[str, list[Slice]] = {}
        self._retained: Stored | None = None  # None: the model directory itself
        self._manifest: Manifest | None = None
        self._incoming: Stored = []
        self._session = False
        self._updates = 0
        # A driver that gives up does not stop the thread that still receives for it: that thread ends before an abort begins.
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        return self._manifest is not None

    def check(self, manifest: Manifest) -> None:
        """Refuse, before a byte moves, what the server would die of. Raises WeightSyncError."""
        if self._manifest is not None:
            raise WeightSyncError(f"{self._server.name}: version {self._manifest.version} is still being received; commit or abort it first")
        if self._specs is None:
            self._specs = stored_specs(self._facts.folder, self._dtype)
        check_manifest(manifest, self._specs, self._server.name, may_lack=(TIED_HEAD,) if self._facts.tied else ())
        needed = export_bytes(manifest)  # retained until the next commit, whichever way it comes
        free = shutil.disk_usage(self._folder()).free
        if needed > free:
            raise WeightSyncError(f"{self._server.name}: version {manifest.version} needs {needed} bytes under {self._folder()}, but {free} are free")

    def begin(self, manifest: Manifest) -> None:
        """The server is paused by now."""
        self._manifest = manifest
        self._incoming, self._pieces = [], {}
        self._updates += 1
        self._begin_session()

    def receive(self, bucket: Bucket, payload: Payload) -> None:
        with self._lock:
            self._receive(bucket, payload)

    def prepared(self, digests: bool) -> dict[str, str]:
        """With `digests`: of the bytes in the files that the server has mapped and loaded. Where each server tensor is made of
        whole tensors of ours (one rank, dense layers) the server's own checksums are compared as well."""
        assert self._manifest is not None, "weights_begin comes first"
        missing = {t.name for t in self._manifest.tensors} - {t.name for bucket, _ in self._incoming for t in bucket.tensors}
        if missing:
            raise WeightSyncError(
                f"{self._server.name}: {len(missing)} tensors of version {self._manifest.version} did not come, the first is {min(missing)!r}"
            )
        self._complete()
        self._end_session()
        if not digests:
            return {}
        tensors = {name: tensor for bucket, file in self._incoming for name, tensor in read_bucket(bucket, file).items()}
        self._check_served(tensors)
        return piece_digests(tensors, self._pieces)

    def commit(self, version: int) -> None:
        received = self._manifest.version if self._manifest is not None else None
        if version != received:
            raise WeightSyncError(f"{self._server.name} serves version {self.version} and has received {received}: it cannot commit version {version}")
        self._server.call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        _remove(self._retained or [])
        self._retained, self._incoming = self._incoming, []
        self.version = version
        self.commits += 1
        self._manifest = None
        self._delta.commit()

    def abort(self) -> None:
        """Load the retained weights again. Does nothing when no update was begun."""
        self.leave()  # these two also free a thread that waits for a bucket
        self._shards.stop()
        with self._lock:
            if self._manifest is None:
                return
            self._end_session()
            if self._incoming:
                self.reload()
            _remove(self._incoming)
            self._incoming = []
            self._manifest = None
            self._delta.abort()

    def reload(self) -> None:
        """Load the retained weights into the server."""
        if self._retained is None:
            self.reload_base()
            return
        self._begin_session()
        for bucket, file in self._retained:
            self._load(bucket, file)
        self._end_session()

    def reload_base(self) -> None:
        """Load the model directory again."""
        self._server.call("/update_weights_from_disk", {"model_path": str(self._facts.folder), "flush_cache": False})

    def restore(self) -> None:
        """Bring back all that a server has lost that let go of its memory."""
        self.reload()

    def _receive(self, bucket: Bucket, payload: Payload) -> None:
        if self._manifest is None or bucket not in self._manifest.buckets:
            raise WeightSyncError(f"{self._server.name}: bucket {bucket.index} is not part of the update that was begun")
        path = self._folder() / f"weights-{self._updates}-{bucket.index}"
        if isinstance(payload, SharedMemory):
            read_bucket(bucket, payload)  # refuses a file that is not there or too short
            _link(Path(payload.path), path)
        elif isinstance(payload, FromStore):
            _write(path, self._delta.read(bucket, payload, self._held().__getitem__))
        elif isinstance(payload, FromShards):
            # Straight into the file that the server maps. All its ranks map the same one, so a byte comes once for all of them.
            self._shards.read(bucket, payload, _new_file(path, nbytes(bucket)))
            self._pieces |= received(bucket, payload)
        else:
            self._receive_to(path, bucket)
        mine = SharedMemory(str(path), path.stat().st_size)
        # A bucket that comes once more takes the place of the first.
        self._incoming = [(b, file) for b, file in self._incoming if b.index != bucket.index] + [(bucket, mine)]
        self._load(bucket, mine)

    def _begin_session(self) -> None:
        self._server.call("/begin_weight_update", {})
        self._session = True

    def _end_session(self) -> None:
        if self._session:
            self._server.call("/end_weight_update", {})
            self._session = False

    def _load(self, bucket: Bucket, file: SharedMemory) -> None:
        self._load_all([(bucket, file)])

    def _load_all(self, files: Stored) -> None:
        # SGLang takes named tensors; the name carries everything, see sglang_loader.py. Its unpickler allows this tensor.
        payload = base64.b64encode(pickle.dumps([(describe(bucket, file), torch.zeros(1)) for bucket, file in files])).decode()
        body = {"serialized_named_tensors": [payload] * self._ranks, "load_format": self._loader, "flush_cache": False}
        self._server.call("/update_weights_from_tensor", body)

    def _complete(self) -> None:
        """All buckets are there; each was loaded as it came."""

    def _check_served(self, tensors: dict[str, torch.Tensor]) -> None:
        if self._ranks == 1:
            check_served(self._server.call("/weights_checker", {"action": "checksum"}), tensors, self._server.name)

    def _receive_to(self, path: Path, bucket: Bucket) -> None:
        _write(path, self._membership.receive(bucket))

    def _held(self) -> dict[str, torch.Tensor]:
        """What is retained of the version that is served."""
        return {name: tensor for bucket, file in self._retained or [] for name, tensor in read_bucket(bucket, file).items()}

    def _folder(self) -> Path:
        assert self._server.scratch is not None, "start the engine first"
        return self._server.scratch


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with path.open("wb") as file:
        for tensor in tensors.values():
            file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _new_file(path: Path, size: int) -> torch.Tensor:
    """A file's bytes as a tensor. They are reserved first: writing to a mapping of a full /dev/shm kills the process."""
    with path.open("wb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _remove(stored: Stored) -> None:
    for _, file in stored:
        Path(file.path).unlink(missing_ok=True)
