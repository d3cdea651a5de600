"""What the processes of weight-sync tests hold: a rank of the real FSDP trainer, and a receiver to look into."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers.models.qwen3.modeling_qwen3  # noqa: F401 (the fork server imports this module: its children need not)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from miles.core.model.config import ModelConfig
from miles.core.model.load import load_model
from trainer.config import TrainerConfig
from trainer.fsdp.backend import FSDPBackend
from weight_sync.contracts import Bucket, FromGroup, GroupSpec, Manifest, SharedMemory, TensorSpec, WeightSyncError
from weight_sync.digests import digest
from weight_sync.transports.broadcast import BroadcastGroup, join
from weight_sync.transports.shared_memory import read_bucket


class Rank:
    """One rank of an FSDP trainer. Carries out one call at a time, as an actor does."""

    def __init__(self, model_path: str, dtype: str, rank: int, world: int, rendezvous: str) -> None:
        if world > 1 or dtype != "float32":
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        model = ModelConfig(path=model_path, dtype=dtype)
        self._backend = FSDPBackend(model, TrainerConfig(), None, temperature=1.0, max_new_tokens=8, seed=0, total_steps=1, rank=rank, world=world)
        self._rank = rank
        self._lock = threading.Lock()

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        with self._lock:
            return fn(self._backend, self._rank, *args)


def move_weights(backend: FSDPBackend, rank: int, factor: float) -> None:
    """Other weights, the same on every split."""
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.mul_(factor).add_(1e-3)


def export_shas(backend: FSDPBackend, rank: int, dtype: str) -> dict[str, str]:
    """sha256 of every exported tensor, gathered by torch's own state-dict code, not by the backend's export."""
    full = get_model_state_dict(backend.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    names = {spec.name for spec in backend.weight_specs()}
    return {name: sha(tensor.to(getattr(torch, dtype))) for name, tensor in full.items() if name in names}


def die_at_tensor(backend: FSDPBackend, rank: int, dying_rank: int, nth: int) -> None:
    """From now on gathering kills `dying_rank` (SIGKILL) at its `nth` tensor."""
    gather = backend.weight_tensors

    def dying(names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal nth
        for item in gather(names):
            nth -= 1
            if nth == 0 and rank == dying_rank:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    backend.weight_tensors = dying  # type: ignore[method-assign]


def limit_file_size(backend: FSDPBackend, rank: int, size: int) -> None:
    """No file of this process may grow beyond `size` bytes: to it, every file system is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


class Engine:
    """The smallest engine: stages buckets beside a model and swaps on commit."""

    def __init__(self, model_path: str, dtype: str) -> None:
        self._model = load_model(model_path, getattr(torch, dtype))
        self._own = dict(self._model.named_parameters())
        self._version = 0
        self._pending: Manifest | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self._group: BroadcastGroup | None = None
        self._running = threading.Event()
        self._running.set()

    def weights_version(self) -> int:
        return self._version

    def weights_join(self, group: GroupSpec, rank: int) -> None:
        if self._group:
            self._group.close()
        self._group = join(group, rank)

    def weights_begin(self, manifest: Manifest) -> None:
        announced = {t.name: t for t in manifest.tensors}
        for name, p in self._own.items():
            own = TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
            if announced.pop(name, None) != own:
                raise WeightSyncError(f"tensor {name!r} is missing or not {own}")
        if announced:
            raise WeightSyncError(f"tensor {next(iter(announced))!r} is not mine")
        self._pending, self._staged = manifest, {}

    def weights_receive(self, bucket: Bucket, payload: SharedMemory | FromGroup) -> None:
        self._staged |= read_bucket(bucket, payload) if isinstance(payload, SharedMemory) else self._group.receive(bucket)  # type: ignore[union-attr]

    def weights_prepared(self, digests: bool) -> dict[str, str]:
        return {n: digest(t) for n, t in self._staged.items()} if digests else {}

    def weights_commit(self, version: int) -> None:
        if version == self._version:
            return
        if not self._pending or self._pending.version != version:
            raise WeightSyncError(f"version {version} is not prepared")
        with torch.no_grad():
            for name, tensor in self._staged.items():
                self._own[name].copy_(tensor)
        self._version, self._pending, self._staged = version, None, {}

    def weights_abort(self) -> None:
        self._pending, self._staged = None, {}
        if self._group:
            self._group.close()
            self._group = None

    def pause(self, mode: str) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def tensor_shas(self) -> dict[str, str]:
        return {n: sha(p) for n, p in self._own.items()}

    def generate_some(self) -> int:
        """Greedy answer to a fixed prompt; returns the version it was made with. Waits while paused, like any engine."""
        if not self._running.wait(5):
            raise RuntimeError("the engine is still paused")
        self._model(input_ids=torch.tensor([[9, 10, 11]]), use_cache=False)
        return self._version
