"""What a run's actors ask a cluster for. Starts and imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from miles.run.recipe import RLRecipe
from rollout.config import RolloutConfig, TeacherEngineConfig
from trainer.config import TrainerConfig

TEACHER = "teacher engine"
EVALUATION = "evaluation engine"

Kind = Literal["CPU", "GPU"]


@dataclass(frozen=True)
class Demand:
    """One actor's share of a node: what a recipe asks for, by role."""

    role: str
    cpus: float
    gpus: float

    def of(self, kind: Kind) -> float:
        return self.cpus if kind == "CPU" else self.gpus

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def trainer_demands(config: TrainerConfig) -> list[Demand]:
    return [Demand("trainer rank", config.threads, config.gpus_per_rank)] * config.ranks


def engine_demands(config: RolloutConfig) -> list[Demand]:
    return [Demand("engine", config.threads, config.gpus_per_engine)] * config.engines


def teacher_demands(config: TeacherEngineConfig | None) -> list[Demand]:
    return [] if config is None else [Demand(TEACHER, config.threads, config.gpus_per_engine)] * config.engines


def rl_demands(recipe: RLRecipe) -> list[Demand]:
    """Of a whole run. Engines that evaluate only are like those that roll out."""
    rollout = recipe.rollout
    apart = [Demand(EVALUATION, rollout.threads, rollout.gpus_per_engine)] * recipe.evaluate.engines
    return trainer_demands(recipe.trainer) + engine_demands(rollout) + apart + teacher_demands(recipe.teacher_engines)


def total(demands: Sequence[Demand], kind: Kind) -> float:
    return sum(d.of(kind) for d in demands)


def sum_text(demands: Sequence[Demand], kind: Kind = "CPU") -> str:
    """`4 trainer ranks x 2 + 1 engine x 1`; roles that ask for nothing of the kind are left out."""
    roles: dict[str, list[float]] = {}
    for demand in demands:
        if demand.of(kind):
            roles.setdefault(demand.role, []).append(demand.of(kind))
    return " + ".join(f"{len(amounts)} {role}{'s' * (len(amounts) > 1)} x {amounts[0]:g}" for role, amounts in roles.items())
