"""Trainer ranks and engines as one test sees them, and what may be asked of them afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from miles.core.model.config import LoraConfig
from tests.weight_sync.parts import Engine, Rank, export_shas, move_weights, step_weights
from tests.weight_sync.processes import EngineProcesses, Process, TrainerProcesses
from weight_sync.config import WeightSyncConfig
from weight_sync.transaction import PublishResult, WeightSync
from weight_sync.transports.registry import run_prefix
from weight_sync.transports.tensor_transport import FOLDER


class Cast:
    """`world` FSDP ranks (with more of `[trainer]`) and engines 0 ... n-1 on one model, each a process. Weights and versions only go forward."""

    def __init__(
        self, model_path: Path, folder: Path, *, world: int, engines: int, dtype: str = "float32", lora: LoraConfig | None = None, **trainer: Any
    ) -> None:
        self._model_path = str(model_path)
        self.dtype = dtype
        self._lora = lora
        self.ranks = [Process(Rank, self._model_path, dtype, rank, world, str(folder / "rendezvous"), lora, trainer) for rank in range(world)]
        self.trainer = TrainerProcesses(self.ranks)
        self.engines = EngineProcesses({i: self._new_engine() for i in range(engines)})

    def sync(self, journal: Path, transport: str, **config: Any) -> WeightSync:
        return WeightSync(self.config(transport, **config), journal, self.trainer, self.engines)

    @staticmethod
    def config(transport: str, **config: Any) -> WeightSyncConfig:
        """Buckets of 0.1 MiB: the tiny model needs several, and its largest tensors fill one alone."""
        return WeightSyncConfig.model_validate({"transport": transport, "bucket_mb": 0.1, "timeout_s": 20.0} | config)

    def next_version(self) -> int:
        return 1 + max(self.versions().values())

    def versions(self) -> dict[int, int]:
        return {i: engine.call("weights_version") for i, engine in self.living().items()}

    def living(self) -> dict[int, Process]:
        return {i: engine for i, engine in self.engines.processes.items() if engine.alive}

    def train(self) -> dict[str, str]:
        """Other weights on the trainer; returns the sha256 of every tensor it would export."""
        asyncio.run(self.trainer.run_on_ranks(move_weights, 0.99))
        return asyncio.run(self.trainer.run_on_ranks(export_shas, self.dtype))[0]

    async def nudge(self, step: float) -> dict[str, str]:
        """A step of size `step` on every weight; returns the sha256 of every tensor that the trainer would export."""
        await self.trainer.run_on_ranks(step_weights, step)
        return (await self.trainer.run_on_ranks(export_shas, self.dtype))[0]

    def held(self) -> dict[int, dict[str, str]]:
        """The sha256 of every tensor that each living engine serves."""
        return {i: engine.call("tensor_shas") for i, engine in self.living().items()}

    def generating(self) -> dict[int, int]:
        """The version each living engine answers with."""
        return {i: engine.call("generate_some") for i, engine in self.living().items()}

    def replace(self, engine_id: int) -> None:
        self.engines.processes[engine_id].kill()
        self.engines.processes[engine_id] = self._new_engine()

    def mend(self) -> None:
        """Replace dead engines and end what a test left open on the others."""
        for engine_id, engine in self.engines.processes.items():
            if engine.alive:
                engine.call("weights_abort")
                engine.call("resume")
            else:
                self.replace(engine_id)

    def close(self) -> None:
        for process in [*self.ranks, *self.engines.processes.values()]:
            process.kill()

    def _new_engine(self) -> Process:
        return Process(Engine, self._model_path, self.dtype, self._lora)


def publish(sync: WeightSync, version: int) -> PublishResult:
    """Publish, and close."""

    async def run() -> PublishResult:
        try:
            return await sync.publish(version)
        finally:
            await sync.close()

    return asyncio.run(run())


def files_of(journal: Path) -> list[Path]:
    """Bucket files of the run with this journal that are still there."""
    return list(FOLDER.glob(f"{run_prefix(journal)}-*"))
