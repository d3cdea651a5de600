"""The rollout actor: one engine, the rewards beside it, and the groups that run through both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray

from miles.core.environment import worker_environment
from miles.core.model.config import LoraConfig, ModelConfig
from miles.core.model.load import tokenizer_of
from miles.data.types import Group, Prompt, Sample, Status
from rollout.config import RewardConfig, RolloutConfig
from rollout.engines.contracts import Engine, EngineError, Generation, Request, SamplingParams
from rollout.line import Line
from rollout.rewards.runner import RewardRunner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GroupTask:
    """A prompt to answer once per entry of `sampling`, within `timeout_s` seconds of its turn at the engine, rewards included."""

    claim_id: int
    prompt: Prompt
    sampling: tuple[SamplingParams, ...]
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """What became of a task: a finished group, or the kind of failure and its message."""

    claim_id: int
    group: Group | None
    kind: Literal["done", "failed", "timed_out", "engine_died", "aborted"] = "done"
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """Everything an actor needs to build its engine and rewards."""

    model: ModelConfig
    rollout: RolloutConfig
    reward: RewardConfig
    log_folder: str
    name: str
    lora: LoraConfig | None = None


class RolloutActor:
    """Runs in its own process. Groups come in waves; each wave streams its results back as groups finish.

    Weight updates reach the engine through `call`, which runs any engine method by name. `base`: as in `TorchEngine`.
    """

    def __init__(self, spec: RolloutSpec, base: Any = None) -> None:
        self._spec = spec
        self._engine: Engine = _build_engine(spec, base)
        self._line = Line(spec.rollout.max_running)
        self._rewards = RewardRunner(spec.reward, tokenizer_of(spec.model))
        self._deadlines: dict[int, asyncio.Timeout] = {}
        self._unwanted: set[int] = set()

    async def start(self) -> str:
        """Bring the engine up; returns the address of this actor's node."""
        if hasattr(self._engine, "start"):
            await self._engine.start()
        return ray.util.get_node_ip_address()

    async def call(self, method: str, *args: Any) -> Any:
        """Run one engine method. Blocking methods get a thread, so that the actor goes on answering."""
        function = getattr(self._engine, method)
        if asyncio.iscoroutinefunction(function):
            return await function(*args)
        return await asyncio.to_thread(function, *args)

    async def run_groups(self, tasks: Sequence[GroupTask]) -> AsyncIterator[GroupResult]:
        """Results of one wave as they come. Raises RewardError when the rewards keep failing; every other fault is a result."""
        with self._engine.hold():
            running = [asyncio.ensure_future(self._run_group(task)) for task in tasks]
            await asyncio.sleep(0)  # each task runs up to its first wait: all requests are submitted, in order
        try:
            for next_done in asyncio.as_completed(running):
                yield await next_done
        finally:
            for task in running:
                task.cancel()

    async def abort_groups(self, claim_ids: Sequence[int]) -> None:
        """Nobody waits for these groups any more: those that still run end now, as `aborted`."""
        for claim_id in claim_ids:
            deadline = self._deadlines.pop(claim_id, None)
            if deadline is not None and not deadline.expired():
                self._unwanted.add(claim_id)
                deadline.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        self._rewards.close()
        await self._engine.close()

    async def _run_group(self, task: GroupTask) -> GroupResult:
        requests = [
            Request(request_id=f"{task.claim_id}/{index}", prompt=task.prompt.tokens, sampling=sampling) for index, sampling in enumerate(task.sampling)
        ]
        try:
            samples = await self._answered(task, requests)
        except EngineError as error:
            kind: Literal["failed", "engine_died", "timed_out", "aborted"] = "failed" if (await self._engine.health()).ok else "engine_died"
            return GroupResult(claim_id=task.claim_id, group=None, kind=kind, message=str(error))
        finally:
            unwanted = task.claim_id in self._unwanted
            self._unwanted.discard(task.claim_id)
        if samples is None:
            kind, message = ("aborted", "others were done first") if unwanted else ("timed_out", f"no result within {task.timeout_s:g} s")
            return GroupResult(claim_id=task.claim_id, group=None, kind=kind, message=message)
        return GroupResult(claim_id=task.claim_id, group=Group(claim_id=task.claim_id, prompt=task.prompt, samples=tuple(samples)))

    async def _answered(self, task: GroupTask, requests: list[Request]) -> list[Sample] | None:
        """The samples with their rewards; None when the deadline passed first, with nothing of them left in the engine.

        Raises:
            EngineError: the engine died; one that hangs may say so only when it is told to abort.
        """
        try:
            async with asyncio.timeout(None) as deadline:
                self._deadlines[task.claim_id] = deadline
                # The further engines work ahead, the longer a group waits there behind others; that is no fault of its own.
                with self._line.joined(len(requests), lambda: deadline.reschedule(asyncio.get_running_loop().time() + task.timeout_s)):
                    generations = await self._generate_to_the_end(requests)
                samples = [_sample(task, request, generation) for request, generation in zip(requests, generations, strict=True)]
                return await self._rewards.score(samples, task.prompt)
        except TimeoutError:
            await self._engine.abort([request.request_id for request in requests])
            return None
        finally:
            self._deadlines.pop(task.claim_id, None)

    async def _generate_to_the_end(self, requests: list[Request]) -> list[Generation]:
        """Aborted generations go on where they stopped (partial rollout): a pause for new weights never loses tokens."""
        parts: list[list[Generation]] = [[] for _ in requests]
        pending = list(range(len(requests)))
        while pending:
            made = await self._engine.generate([_continued(requests[i], parts[i]) for i in pending])
            for index, generation in zip(pending, made, strict=True):
                parts[index].append(generation)
            pending = [i for i, generation in zip(pending, made, strict=True) if generation.finish == "abort"]
        return [_joined(p) for p in parts]


def _build_engine(spec: RolloutSpec, base: Any) -> Engine:
    if spec.rollout.engine == "torch":
        from rollout.engines.torch_engine import TorchEngine

        return TorchEngine(spec.model, max_running=spec.rollout.max_running, threads=spec.rollout.threads, lora=spec.lora, base=base)
    from rollout.engines.sglang_engine import SGLangEngine

    return SGLangEngine(spec.model, spec.rollout, log_folder=Path(spec.log_folder), lora=spec.lora)


def actor_options(spec: RolloutSpec) -> dict[str, Any]:
    """Ray options of a rollout actor: its share of CPU and GPU, and thread counts set before torch is imported."""
    return {
        "num_cpus": spec.rollout.threads,
        "num_gpus": spec.rollout.gpus_per_engine,
        "max_concurrency": 1000,
        "runtime_env": {"env_vars": worker_environment(spec.rollout.threads)},
    }


def _continued(request: Request, parts: list[Generation]) -> Request:
    return replace(request, generated=np.concatenate([p.tokens for p in parts])) if parts else request


def _joined(parts: list[Generation]) -> Generation:
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[-1],
        tokens=np.concatenate([p.tokens for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
        weight_versions=np.concatenate([p.weight_versions for p in parts]),
    )


def _sample(task: GroupTask, request: Request, generation: Generation) -> Sample:
    response = len(generation.tokens)
    return Sample(
        sample_id=request.request_id,
        group_id=str(task.claim_id),
        tokens=np.concatenate([task.prompt.tokens, generation.tokens]),
        prompt_length=len(task.prompt.tokens),
        loss_mask=np.ones(response, bool),
        logprobs=generation.logprobs,
        weight_versions=generation.weight_versions,
        status=Status.COMPLETED if generation.finish == "stop" else Status.TRUNCATED,
    )
