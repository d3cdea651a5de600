"""What the processes of weight-sync tests hold: a rank of the FSDP trainer, and a torch engine that can be looked into."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers.models.qwen3.modeling_qwen3  # noqa: F401 (the fork server imports this module: its children need not)
from numpy.typing import NDArray
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from miles.core.model.config import LoraConfig, ModelConfig
from miles.data.types import Sample, Status
from rollout.engines.contracts import Request, SamplingParams
from rollout.engines.torch_engine import TorchEngine
from trainer.config import TrainerConfig
from trainer.fsdp.backend import FSDPBackend
from weight_sync.slices import Slice

GENERATE_S = 20.0
PROMPT = (9, 10, 11)


class Rank:
    """One rank of an FSDP trainer. Carries out one call at a time, as an actor does."""

    def __init__(self, model_path: str, dtype: str, rank: int, world: int, rendezvous: str, lora: LoraConfig | None, trainer: dict[str, Any]) -> None:
        if world > 1 or dtype != "float32":
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        model = ModelConfig.model_validate({"path": model_path, "dtype": dtype})
        config = TrainerConfig.model_validate({"ranks": world} | trainer)
        self._backend = FSDPBackend(model, config, None, temperature=1.0, max_new_tokens=8, seed=0, total_steps=1, rank=rank, world=world, lora=lora)
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


def step_weights(backend: FSDPBackend, rank: int, step: float) -> None:
    """What an optimizer's step of that size does: every weight moves by at most `step`."""
    with torch.no_grad():
        for number, parameter in enumerate(backend.model.parameters()):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.add_(torch.randn(local.shape, generator=torch.Generator().manual_seed(number)).sign(), alpha=step)


def scores(backend: FSDPBackend, rank: int, tokens: list[int]) -> list[float]:
    """The trainer's log-probs of an engine's answer."""
    count = len(tokens)
    sample = Sample(
        sample_id="0",
        group_id="0",
        tokens=np.array([*PROMPT, *tokens]),
        prompt_length=len(PROMPT),
        loss_mask=np.ones(count, bool),
        logprobs=np.zeros(count, np.float32),
        weight_versions=np.zeros(count, np.int32),
        status=Status.COMPLETED,
    )
    return backend.logprobs([sample])[0]


def export_shas(backend: FSDPBackend, rank: int, dtype: str) -> dict[str, str]:
    """sha256 of every exported tensor, gathered by torch's own state-dict code, not by the backend's export."""
    full = get_model_state_dict(backend.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: sha(tensor.to(getattr(torch, dtype))) for name, tensor in full.items() if isinstance(tensor, torch.Tensor)}


def export_tensors(backend: FSDPBackend, rank: int) -> dict[str, NDArray[np.float32]]:
    """Every tensor of the model, gathered by torch's own state-dict code."""
    full = get_model_state_dict(backend.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: tensor.numpy() for name, tensor in full.items() if isinstance(tensor, torch.Tensor)}


def die_at_tensor(backend: FSDPBackend, rank: int, dying_rank: int, nth: int) -> None:
    """From now on gathering, or copying a slice of its own, kills `dying_rank` (SIGKILL) at its `nth` tensor."""
    gather, copy = backend.weight_tensors, backend.weight_slice

    def count_down() -> None:
        nonlocal nth
        nth -= 1
        if nth == 0 and rank == dying_rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for item in gather(names):
            count_down()
            yield item

    def dying_copy(piece: Slice) -> torch.Tensor:
        count_down()
        return copy(piece)

    backend.weight_tensors = dying  # type: ignore[method-assign]
    backend.weight_slice = dying_copy  # type: ignore[method-assign]


def process_id(backend: FSDPBackend, rank: int) -> int:
    return os.getpid()


def limit_file_size(backend: FSDPBackend, rank: int, size: int) -> None:
    """No file of this process may grow beyond `size` bytes: to it, every file system is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


class Engine(TorchEngine):
    """The torch engine, with a look at what it serves."""

    def __init__(self, model_path: str, dtype: str, lora: LoraConfig | None = None) -> None:
        super().__init__(ModelConfig.model_validate({"path": model_path, "dtype": dtype}), max_running=4, threads=1, lora=lora)

    def tensor_shas(self) -> dict[str, str]:
        """sha256 of every tensor of the module that generates, tied ones under each name."""
        return {name: sha(tensor) for name, tensor in self._weights._model.state_dict().items()}

    def bytes_read(self) -> int:
        """What this engine has read from trainer ranks, by the transfer engine's telemetry."""
        return self._weights._shards.moved.bytes

    async def generate_some(self) -> int:
        """Answer a fixed prompt; returns the version that the tokens carry. A paused engine runs into the deadline."""
        request = Request(request_id="probe", prompt=np.array([9, 10, 11]), sampling=SamplingParams(max_new_tokens=2, temperature=0.0))
        answer = (await asyncio.wait_for(self.generate([request]), GENERATE_S))[0]
        (version,) = set(answer.weight_versions.tolist())
        return int(version)

    async def answer(self) -> tuple[list[int], list[float]]:
        """Eight sampled tokens behind a fixed prompt, and their log-probs."""
        request = Request(request_id="probe", prompt=np.array(PROMPT), sampling=SamplingParams(max_new_tokens=8, seed=1))
        answer = (await asyncio.wait_for(self.generate([request]), GENERATE_S))[0]
        return answer.tokens.tolist(), answer.logprobs.tolist()

    async def generate_long(self) -> tuple[str, list[int]]:
        """Answer up to the context's end; how it finished, and the version of every token."""
        request = Request(request_id="long", prompt=np.array([9, 10, 11]), sampling=SamplingParams(max_new_tokens=250))
        answer = (await asyncio.wait_for(self.generate([request]), GENERATE_S))[0]
        return answer.finish, answer.weight_versions.tolist()

    async def wait_until_generating(self) -> None:
        while not (await self.health()).running:
            await asyncio.sleep(0.001)
