"""Trainer ranks as Ray actors, and `TrainerGroup`, which the driver calls as if they were one trainer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from algorithms.config import AlgorithmConfig
from algorithms.distillation.config import DistillConfig
from algorithms.preference.config import PairConfig
from miles.config import ConfigError
from miles.core.checkpoint.config import CheckpointConfig
from miles.core.checkpoint.store import CheckpointError
from miles.core.environment import worker_environment
from miles.core.model.config import LoraConfig, ModelConfig
from miles.core.planning.residency import Residency
from miles.data.types import Group, Sample
from trainer.config import CriticConfig, TrainerConfig
from trainer.contracts import ClaimedPrompt, StepResult

logger = logging.getLogger(__name__)

GRACE_S = 3.0
"""When one rank fails its peers fail too, in a collective. So long the driver waits for all of them, to name the first cause."""

CLOSE_S = 60.0
"""How long a checkpoint that is being written may take to end when the group closes."""


class TrainerError(RuntimeError):
    """A rank raised, died or hangs. The message has the rank and the traceback."""


class TrainerRank:
    """One rank, in a process of its own. Torch is imported by its methods, after Ray has set the thread counts."""

    def __init__(self, rank: int, world: int, gpu: bool, timeout_s: float) -> None:
        self._rank, self._world, self._gpu, self._timeout_s = rank, world, gpu, timeout_s
        self._address = ray.util.get_node_ip_address()
        self._store: Any = None
        self._backends: dict[str, Any] = {}

    def open(self) -> Any:
        """Rank 0: where the others meet it."""
        from trainer.rendezvous import open_store

        self._store, meeting = open_store(self._address, self._world, self._timeout_s)
        return meeting

    def join(self, meeting: Any, threads: int) -> str:
        """Join the group; returns this node's address."""
        import torch

        from trainer.rendezvous import join

        torch.set_num_threads(threads)
        join(meeting, self._store, rank=self._rank, world=self._world, address=self._address, gpu=self._gpu, timeout_s=self._timeout_s)
        return self._address

    def build(self, tenant: str, options: dict[str, Any]) -> None:
        """Build a tenant's backend, on the base weights of the first where there is one."""
        import torch

        device = torch.device("cuda", torch.cuda.current_device()) if self._gpu else torch.device("cpu")
        shared = {"base": next(iter(self._backends.values())).model} if self._backends else {}
        self._backends[tenant] = backend_class(options["trainer"])(**options, **shared, rank=self._rank, world=self._world, device=device)

    def call(self, tenant: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run one method of a tenant's backend. Only rank 0 sends its result back: all ranks have the same."""
        result = getattr(self._backends[tenant], method)(*args, **kwargs)
        return result if self._rank == 0 else None

    def run(self, tenant: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(backend, rank, *args)`: how weight_sync's senders reach the weights."""
        return function(self._backends[tenant], self._rank, *args)


def backend_class(config: TrainerConfig) -> type[Any]:
    """Imported when asked for: each brings packages that the other can do without."""
    if config.backend == "megatron":
        from trainer.megatron.backend import MegatronBackend

        return MegatronBackend
    from trainer.fsdp.backend import FSDPBackend

    return FSDPBackend


class TrainerRanks:
    """The processes of all ranks. They begin as soon as this is made, and meet once, whoever asks first.

    Args:
        places: a Ray scheduling strategy for each rank; None lets Ray choose.
    """

    def __init__(self, trainer: TrainerConfig, places: Sequence[Any] | None = None) -> None:
        self._threads = trainer.threads
        world, gpu = trainer.ranks, trainer.gpus_per_rank > 0
        strategies = list(places) if places is not None else ["DEFAULT"] * world
        if len(strategies) != world:
            raise ValueError(f"trainer.ranks = {world}, but {len(strategies)} places were given")
        self.actors: list[Any] = [
            ray.remote(TrainerRank)
            .options(
                num_cpus=trainer.threads,
                num_gpus=trainer.gpus_per_rank,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": worker_environment(trainer.threads)},
            )
            .remote(rank, world, gpu, trainer.timeout_s)
            for rank, strategy in enumerate(strategies)
        ]
        self._meeting: asyncio.Task[list[str]] | None = None

    async def meet(self) -> list[str]:
        """Their nodes' addresses, once all have joined."""
        if self._meeting is None:
            self._meeting = asyncio.ensure_future(self._meet())
        return await asyncio.shield(self._meeting)

    async def _meet(self) -> list[str]:
        meeting = (await results_of_ranks([self.actors[0].open.remote()]))[0]
        return await results_of_ranks([rank.join.remote(meeting, self._threads) for rank in self.actors])

    def close(self) -> None:
        """Idempotent."""
        actors, self.actors = self.actors, []
        for rank in actors:
            ray.kill(rank)


class TrainerGroup:
    """The trainer as the driver sees it. Every method runs on all ranks and returns rank 0's result.

    Args:
        temperature, max_new_tokens, seed, total_steps, distill, pairs, critic, lora, prefix_overlap: as in `FSDPBackend`; `total_steps` counts optimizer steps.
        checkpoint: what `save` keeps, and whether it writes in the background.
        places: as in `TrainerRanks`. ranks: those of all tenants of a run, in place of its own; they stay when this group closes.
        tenant: whose part of them this is.
    """

    def __init__(
        self,
        *,
        model: ModelConfig,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig | None,
        checkpoint: CheckpointConfig,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        total_steps: int,
        places: Sequence[Any] | None = None,
        ranks: TrainerRanks | None = None,
        tenant: str = "",
        distill: DistillConfig | None = None,
        pairs: PairConfig | None = None,
        critic: CriticConfig | None = None,
        lora: LoraConfig | None = None,
        prefix_overlap: bool = False,
    ) -> None:
        self._checkpoint = checkpoint
        self._options = {
            "model": model,
            "trainer": trainer,
            "algorithm": algorithm,
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "seed": seed,
            "total_steps": total_steps,
            "distill": distill,
            "pairs": pairs,
            "critic": critic,
            "lora": lora,
        } | ({"prefix_overlap": True} if prefix_overlap else {})
        self._own = TrainerRanks(trainer, places) if ranks is None else None
        self._shared = ranks or self._own
        self._tenant = tenant
        self.addresses: list[str] = []
        self._failed = False

    async def start(self) -> None:
        """Build the backend on every rank."""
        assert self._shared is not None
        try:
            addresses = await self._shared.meet()
        except TrainerError:
            self._failed = True
            raise
        await self._all([rank.build.remote(self._tenant, self._options) for rank in self._ranks])
        self.addresses = addresses

    async def step_rl(self, groups: Sequence[Group]) -> StepResult:
        # Put once: otherwise each rank's call would carry the whole batch.
        return await self._call("step_rl", ray.put(list(groups)))

    async def prefill(self, prompts: Sequence[ClaimedPrompt], open_claims: Set[int], version: int) -> None:
        await self._call("prefill", list(prompts), set(open_claims), version)

    async def residency(self, budget: int | None) -> Residency | None:
        return await self._call("residency", budget)

    async def step_sft(self, samples: Sequence[Sample]) -> StepResult:
        return await self._call("step_sft", ray.put(list(samples)))

    async def step_pairs(self, samples: Sequence[Sample]) -> StepResult:
        return await self._call("step_pairs", ray.put(list(samples)))

    async def evaluate_pairs(self, samples: Sequence[Sample]) -> dict[str, float]:
        return await self._call("evaluate_pairs", ray.put(list(samples)))

    async def logprobs(self, samples: Sequence[Sample], reference: bool = False) -> list[list[float]]:
        return await self._call("logprobs", ray.put(list(samples)), reference)

    async def divergence(self, samples: Sequence[Sample]) -> float:
        return await self._call("divergence", ray.put(list(samples)))

    async def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Start a checkpoint at `folder` (from `CheckpointStore.begin`); with `checkpoint.asynchronous` it goes on in the background."""
        await self._call("save", Path(folder).absolute(), extra, keep=self._checkpoint.keep, asynchronous=self._checkpoint.asynchronous)

    async def wait_saved(self) -> None:
        await self._call("wait_saved")

    async def load(self, folder: Path) -> dict[str, Any]:
        """Take up the checkpoint in `folder`.

        Raises:
            ConfigError: it is not whole, or of another model, adapter, critic or backend.
        """
        try:
            return await self._call("load", Path(folder).absolute())
        except TrainerError as error:
            if isinstance(error.__cause__, CheckpointError):
                raise ConfigError(f"{error.__cause__}. Go on with the model and trainer that wrote it, or name a new run.folder") from error
            raise

    async def export(self, folder: Path) -> None:
        await self._call("export", Path(folder).absolute())

    async def export_adapter(self, folder: Path) -> None:
        await self._call("export_adapter", Path(folder).absolute())

    async def run_on_ranks(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(backend, rank, *args)` on every rank; their results by rank. `fn` is a function of a module: it travels by name."""
        return await self._all([rank.run.remote(self._tenant, fn, *args) for rank in self._ranks])

    async def close(self) -> None:
        """Let a checkpoint that is being written end, then end the processes. Idempotent; never raises for a rank that is dead.

        After a failure the ranks may wait for each other in a collective, so they are ended at once."""
        ranks, self._shared = self._ranks, None
        if self.addresses and ranks and not self._failed:
            await asyncio.wait([asyncio.ensure_future(_quietly(rank, self._tenant)) for rank in ranks], timeout=CLOSE_S)
        if self._own is not None:
            self._own.close()

    @property
    def _ranks(self) -> list[Any]:
        return [] if self._shared is None else self._shared.actors

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return (await self._all([rank.call.remote(self._tenant, method, *args, **kwargs) for rank in self._ranks]))[0]

    async def _all(self, refs: list[Any]) -> list[Any]:
        try:
            return await results_of_ranks(refs)
        except TrainerError:
            self._failed = True
            raise


async def results_of_ranks(refs: Sequence[Any]) -> list[Any]:
    """What the calls `refs`, one of each rank, return.

    Raises:
        TrainerError: names the rank that failed first, or that its peers waited for in vain.
    """
    waiting = [asyncio.ensure_future(_result(ref)) for ref in refs]
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
    if any(task.exception() for task in done):
        if pending:
            await asyncio.wait(pending, timeout=GRACE_S)
        raise _explain(waiting)
    return [task.result() for task in waiting]


async def _result(ref: Any) -> Any:
    return await ref


async def _quietly(rank: Any, tenant: str) -> None:
    try:
        await rank.call.remote(tenant, "close")
    except RayError as error:
        logger.warning("a trainer rank did not close in order: %s", str(error).splitlines()[0])


def _explain(tasks: Sequence[asyncio.Future[Any]]) -> TrainerError:
    """The likeliest first cause: a rank that died, then one that raised something else than a broken collective, then one that hangs."""
    failures = {rank: task.exception() for rank, task in enumerate(tasks) if task.done() and task.exception() is not None}
    rank = min(failures, key=lambda r: (_order(failures[r]), r))
    error = failures[rank]
    silent = [r for r, task in enumerate(tasks) if not task.done()]
    if isinstance(error, RayActorError):
        message = f"trainer rank {rank} of {len(tasks)} died:\n{error}"
    elif silent and _waited_in_vain(error):
        hanging = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        message = f"trainer {hanging} of {len(tasks)} hang{'s' * (len(silent) == 1)}: rank {rank} waited for trainer.timeout_s in vain:\n{error}"
    else:
        message = f"trainer rank {rank} of {len(tasks)} failed:\n{error}"
    raised = TrainerError(message)
    raised.__cause__ = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error
    return raised


def _order(error: BaseException | None) -> int:
    if isinstance(error, RayActorError):
        return 0
    # gloo and NCCL say so when a peer has gone.
    broken = any(word in str(error) for word in ("Connection closed by peer", "Connection reset by peer", "DistBackendError", "DistNetworkError"))
    return 2 if broken or _waited_in_vain(error) else 1


def _waited_in_vain(error: BaseException | None) -> bool:
    """Whether gloo or NCCL gave a collective up at its deadline."""
    return any(word in str(error) for word in ("Timed out waiting", "Watchdog caught collective operation timeout"))
