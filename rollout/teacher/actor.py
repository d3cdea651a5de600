"""The teacher's actor: one scoring engine in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.core.environment import worker_environment
from miles.core.model.config import ModelConfig
from rollout.config import RolloutConfig, TeacherEngineConfig
from rollout.engines.scoring import Scored, ScoreRequest, ScoringEngine


@dataclass(frozen=True, kw_only=True)
class TeacherSpec:
    """Everything an actor needs to build its engine. `temperature`: of the log-probs that it tells."""

    model: ModelConfig
    engine: TeacherEngineConfig
    temperature: float
    log_folder: str


class TeacherActor:
    """Runs in its own process, and so does everything its engine starts."""

    def __init__(self, spec: TeacherSpec) -> None:
        self._engine: ScoringEngine = _build_engine(spec)

    async def start(self) -> None:
        await self._engine.start()

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        return await self._engine.score(requests)

    async def close(self) -> None:
        await self._engine.close()


def actor_options(spec: TeacherSpec) -> dict[str, Any]:
    """Ray options of a teacher's actor: its share of CPU and GPU, and thread counts set before torch is imported."""
    return {
        "num_cpus": spec.engine.threads,
        "num_gpus": spec.engine.gpus_per_engine,
        "max_concurrency": 1000,
        "runtime_env": {"env_vars": worker_environment(spec.engine.threads)},
    }


def _build_engine(spec: TeacherSpec) -> ScoringEngine:
    config = spec.engine
    if config.engine == "torch":
        from rollout.engines.torch_scorer import TorchScorer

        return TorchScorer(spec.model, temperature=spec.temperature, threads=config.threads)
    from rollout.engines.sglang_engine import SGLangEngine

    assert spec.temperature == 1, "SGLang tells prompt log-probs at temperature 1; the recipe was checked"
    served = RolloutConfig(engine="sglang", max_running=64, threads=config.threads, gpus_per_engine=config.gpus_per_engine, sglang_args=config.sglang_args)
    return SGLangEngine(spec.model, served, log_folder=Path(spec.log_folder))
