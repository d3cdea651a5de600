"""The torch engine's side of a weight transaction: buckets are staged beside the served weights and take their place at commit.

A model with adapters takes updates of those alone, under the names of peft's files. They stay apart from the base: merged into bfloat16
weights, what a few steps changed would be rounded away, and the engine would not sample from what the trainer trains."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from miles.core.model.lora import adapter_tensors
from weight_sync.contracts import Bucket, FromShards, FromStore, InPlace, Manifest, Payload, SharedMemory, TensorSpec, WeightSyncError
from weight_sync.layout import nbytes
from weight_sync.manifest import check_manifest
from weight_sync.slices import Slice
from weight_sync.transports.broadcast import Membership
from weight_sync.transports.delta import DeltaReader
from weight_sync.transports.p2p import ShardReader, piece_digests, received
from weight_sync.transports.shared_memory import read_bucket
from weight_sync.transports.views import check_unmoved, counter, read_in_place

_ALIGNED = 64
"""Bytes. Products of the same numbers may differ in their last bits with the alignment of the operands; what an allocator gives has this one."""
_BLOCK = 128


class StagedWeights:
    """What is being received for `model`, whose tensors carry the names of its checkpoint; tied tensors come once."""

    def __init__(self, model: PreTrainedModel, version: int):
        self.version = version
        self._model = model
        self.specs = {name: _spec(name, part) for name, part in self._held().items()}
        self._manifest: Manifest | None = None
        self._staged: dict[str, Tensor] = {}
        self._membership = Membership("torch engine")
        self.join, self.leave = self._membership.join, self._membership.leave
        self._delta = DeltaReader()
        self._shards = ShardReader("torch engine")
        self._pieces: dict[str, list[Slice]] = {}
        self._viewed: tuple[Tensor, int] | None = None
        self._views: tuple[Tensor, int] | None = None

    @property
    def in_place(self) -> bool:
        """Whether what is staged is the trainer's own memory, which is to be served where it lies."""
        return self._views is not None

    def check_unmoved(self) -> None:
        """Raises WeightSyncError where weights that are the trainer's own have changed since they were committed."""
        if self._viewed is not None:
            check_unmoved(*self._viewed)

    def begin(self, manifest: Manifest) -> None:
        """Raises WeightSyncError naming the first tensor whose name, shape or dtype is not the model's, that comes twice or lacks."""
        if self._manifest is not None:
            raise WeightSyncError(f"torch engine: version {self._manifest.version} is still being received; commit or abort it first")
        check_manifest(manifest, self.specs, "torch engine")
        self._manifest, self._staged, self._pieces, self._views = manifest, {}, {}, None

    def receive(self, bucket: Bucket, payload: Payload) -> None:
        """By the `tensor` transport nothing is copied yet: the sender's pages are kept, though its file loses its name."""
        if self._manifest is None or bucket not in self._manifest.buckets:
            raise WeightSyncError(f"torch engine: bucket {bucket.index} does not belong to an update that has begun")
        # Bound before the wait: a read that outlives its aborted update fills that update's own dictionary, never the next one's.
        staged = self._staged
        if isinstance(payload, SharedMemory):
            staged.update(read_bucket(bucket, payload))
        elif isinstance(payload, InPlace):
            staged.update(read_in_place(bucket, payload))
            self._views = counter(payload.path), payload.moves
        elif isinstance(payload, FromStore):
            staged.update(self._delta.read(bucket, payload, self._held().__getitem__))
        elif isinstance(payload, FromShards):
            pieces = self._pieces
            staged.update(self._shards.read(bucket, payload, torch.empty(nbytes(bucket), dtype=torch.uint8)))
            pieces.update(received(bucket, payload))
        else:
            staged.update(self._membership.receive(bucket))

    def prepared(self, digests: bool) -> dict[str, str]:
        if self._manifest is None:
            raise WeightSyncError("torch engine: no update has begun")
        missing = self.specs.keys() - self._staged.keys()
        if missing:
            raise WeightSyncError(f"torch engine: version {self._manifest.version} lacks {len(missing)} tensors, the first is {min(missing)!r}")
        return piece_digests(self._staged, self._pieces) if digests else {}

    def commit(self, version: int, *, stay: bool = False) -> bool:
        """Serve what was staged; the caller sees to it that no step runs. False when `version` is served already.

        Staged tensors take the place of the model's, or where those must `stay` in their memory, are copied there."""
        if self._manifest is None and version == self.version:
            return False
        if self._manifest is None or self._manifest.version != version:
            raise WeightSyncError(f"torch engine: version {version} is not prepared; it serves version {self.version}")
        self.prepared(digests=False)
        with torch.no_grad():
            if adapters := adapter_tensors(self._model):
                for name, adapter in adapters.items():
                    adapter.copy_(self._staged[name])
            else:
                for name, own in _own_tensors(self._model).items():
                    _write(self._model, name, own, self._staged, stay)
        self.version, self._viewed = version, self._views
        self._manifest, self._staged, self._pieces, self._views = None, {}, {}, None
        self._delta.commit()
        return True

    def abort(self) -> None:
        self._shards.stop()
        self._manifest, self._staged, self._pieces, self._views = None, {}, {}, None
        self._delta.abort()
        self.leave()

    def _held(self) -> dict[str, Tensor]:
        """What is served, as the checkpoint (the adapter's) has it."""
        if adapters := adapter_tensors(self._model):
            return {name: own.detach() for name, own in adapters.items()}
        return {name: part for own_name, own in _own_tensors(self._model).items() for name, part in _as_in_checkpoint(self._model, own_name, own).items()}


def _own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers under the names they have in memory, tied ones once."""
    own: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        own.setdefault(id(tensor), (name, tensor))
    return dict(own.values())


def _as_in_checkpoint(model: PreTrainedModel, name: str, own: Tensor) -> dict[str, Tensor]:
    """One tensor in memory -> the tensors that a checkpoint has for it (fused experts are many)."""
    return revert_weight_conversion(model, {name: own.detach()})


def _write(model: PreTrainedModel, name: str, own: Tensor, staged: dict[str, Tensor], stay: bool) -> None:
    """The checkpoint's tensor becomes the one in memory where it may; else its elements are written to whatever places they come from."""
    parts = _as_in_checkpoint(model, name, own)
    if len(parts) == 1 and next(iter(parts.values())).data_ptr() == own.data_ptr():
        new = staged[next(iter(parts))]
        if stay:
            # The engine may hold it transposed. Whole, that copy would cross a page with every element; by blocks it takes a sixth of the time.
            for block, new_block in zip(own.split(_BLOCK), new.split(_BLOCK), strict=True):
                block.copy_(new_block)
            return
        fits = new.device == own.device and new.is_contiguous() and new.data_ptr() % _ALIGNED == 0
        own.data = new if fits else torch.empty_like(own).copy_(new)  # never into what is there: others may serve from it
        return
    places = torch.arange(own.numel(), device=own.device).view(own.shape)
    for part_name, places_of_part in _as_in_checkpoint(model, name, places).items():
        own.view(-1)[places_of_part.reshape(-1)] = staged[part_name].to(own.device).reshape(-1)


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
