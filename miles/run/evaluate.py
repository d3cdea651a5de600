"""Evaluation: pass@k, greedy accuracy, length and truncation on prompts of its own, all at one weight version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from miles.config import Resolved
from miles.core.model.config import ModelConfig
from miles.core.model.load import end_tokens, prompt_room, tokenizer_of
from miles.data.prompts import PromptDataset
from miles.data.types import Group, Prompt, Status
from miles.run.cluster import cluster
from miles.run.demands import engine_demands
from miles.run.folder import held
from miles.run.metrics import pass_at_k
from miles.run.preflight import check_evaluate
from miles.run.recipe import EvaluateRecipe
from miles.run.samples import sample_table
from miles.tracking.tracker import Tracker
from rollout.actor import GroupResult, GroupTask, RolloutSpec
from rollout.config import EvaluateConfig, SamplingConfig
from rollout.engines.contracts import SamplingParams
from rollout.fleet import Fleet
from rollout.rewards.registry import check_columns
from rollout.rewards.steps import StepCutter

logger = logging.getLogger(__name__)

EVALUATION_TIMEOUT_S = 3600.0
ATTEMPTS = 3
"""How often a prompt is asked when engines die over it."""


@dataclass(frozen=True)
class Evaluation:
    """`metrics` by the names of `miles/tracking/names.py`; `groups`: the sampled answers, one group per prompt."""

    metrics: dict[str, float]
    groups: tuple[Group, ...]


class Evaluator:
    """Evaluates the weights that a fleet serves. Nothing may publish weights while `run` is under way: the caller sees to it,
    and `run` checks that every token came from one version."""

    def __init__(self, config: EvaluateConfig, prompts: Sequence[Prompt], stop_ids: tuple[int, ...], seed: int, rewarded: bool = True) -> None:
        self._config, self._prompts, self._stop_ids, self._seed, self._rewarded = config, prompts, stop_ids, seed, rewarded

    @classmethod
    def load(cls, config: EvaluateConfig, model: ModelConfig, seed: int, *, rewarded: bool = True) -> Evaluator:
        """`rewarded`: whether the recipe has rewards; without them nothing counts as correct or failed, and only the shape of answers is reported.

        Raises ValueError when the data does not load, or stop strings are not single tokens."""
        tokenizer = tokenizer_of(model)
        dataset = PromptDataset.load(config.data, tokenizer, prompt_room(model, config.max_new_tokens, "evaluate.max_new_tokens"))
        return cls(config, [dataset[i] for i in range(len(dataset))], end_tokens(model, tokenizer, config.stop), seed, rewarded)

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    async def run(self, fleet: Fleet, heal: Callable[[], Awaitable[None]]) -> Evaluation:
        """Answer every prompt `samples_per_prompt` times, and once greedily when asked. `heal` replaces dead engines at the same weights."""
        config = self._config
        tasks = [self._task(index, prompt, greedy=False) for index, prompt in enumerate(self._prompts)]
        if config.greedy:
            tasks += [self._task(len(self._prompts) + index, prompt, greedy=True) for index, prompt in enumerate(self._prompts)]
        results = await _answers(fleet, tasks, heal)
        sampled, greedy = results[: len(self._prompts)], results[len(self._prompts) :]
        groups = tuple(r.group for r in sampled if r.group is not None)
        metrics = evaluation_metrics(groups, len(self._prompts), config, rewarded=self._rewarded)
        if config.greedy and self._rewarded:
            correct = [s.reward is not None and s.reward >= config.pass_threshold for r in greedy if r.group is not None for s in r.group.samples]
            metrics["eval/greedy"] = sum(correct) / len(self._prompts)
        return Evaluation(metrics, groups)

    def _task(self, index: int, prompt: Prompt, *, greedy: bool) -> GroupTask:
        count = 1 if greedy else self._config.samples_per_prompt
        seeds = np.random.SeedSequence([self._seed, 1, index]).generate_state(count, np.uint64) >> np.uint64(1)
        sampling = tuple(sampling_params(self._config, self._stop_ids, int(seed), greedy=greedy) for seed in seeds)
        return GroupTask(claim_id=-1 - index, prompt=prompt, sampling=sampling, timeout_s=EVALUATION_TIMEOUT_S)


async def _answers(fleet: Fleet, tasks: Sequence[GroupTask], heal: Callable[[], Awaitable[None]]) -> list[GroupResult]:
    """One result a task. An engine that died says nothing about the model, so what it was asked is asked again."""
    answered: dict[int, GroupResult] = {}
    missing = list(tasks)
    for _ in range(ATTEMPTS):
        if fleet.dead_ids:
            await heal()
        answered |= {result.claim_id: result for result in await asyncio.gather(*fleet.submit(missing))}
        missing = [task for task in tasks if answered[task.claim_id].kind == "engine_died"]
        if not missing:
            break
    else:
        logger.warning("%d of %d groups of answers count as not solved: engines died over each of them %d times", len(missing), len(tasks), ATTEMPTS)
    return [answered[task.claim_id] for task in tasks]


def evaluation_metrics(groups: Sequence[Group], num_prompts: int, config: EvaluateConfig, *, rewarded: bool = True) -> dict[str, float]:
    """pass@k over all prompts (a prompt without an answer counts as not solved) where there are rewards, and the shape of the answers.

    Raises:
        RuntimeError: tokens of more than one weight version: something published during the evaluation.
    """
    samples = [s for g in groups for s in g.samples]
    versions = {int(v) for s in samples for v in s.weight_versions[s.loss_mask]}
    if len(versions) > 1:
        raise RuntimeError(f"an evaluation used weight versions {sorted(versions)}: weights were published while it ran")
    correct = [sum(s.reward is not None and s.reward >= config.pass_threshold for s in g.samples) for g in groups]
    known = [s.reward for s in samples if s.reward is not None]
    n = config.samples_per_prompt

    def mean_pass(k: int) -> float:
        return sum(pass_at_k(n, c, k) for c in correct) / num_prompts

    correctness = {
        **{f"eval/pass_at_{k}": mean_pass(k) for k in {1, *config.k}},
        "eval/reward_mean": float(np.mean(known)) if known else 0.0,
        "eval/failed": float(num_prompts * n - len(known)),
    }
    return (correctness if rewarded else {}) | {
        "eval/length_mean": float(np.mean([s.response_length for s in samples])) if samples else 0.0,
        "eval/truncated": float(np.mean([s.status is Status.TRUNCATED for s in samples])) if samples else 0.0,
        "eval/version": float(next(iter(versions), 0)),
    }


def sampling_params(config: SamplingConfig, stop_ids: tuple[int, ...], seed: int, *, greedy: bool = False) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=0.0 if greedy else config.temperature,
        top_k=0 if greedy else config.top_k,
        top_p=1.0 if greedy else config.top_p,
        stop_token_ids=stop_ids,
        seed=seed,
    )


def run(recipe: Resolved[EvaluateRecipe]) -> Evaluation:
    """`miles evaluate`: start the engines, evaluate, write the metrics into the run folder."""
    config = recipe.config
    check_evaluate(recipe)
    folder = Path(config.run.folder)
    if config.reward.steps:
        StepCutter(config.reward.steps, tokenizer_of(config.model))
    evaluator = Evaluator.load(config.evaluate, config.model, config.run.seed)
    check_columns(config.reward, evaluator.prompts, "evaluate.data")
    with held(config.run), cluster(config.cluster, engine_demands(config.rollout), one_node=False) as places:
        specs = [
            RolloutSpec(model=config.model, rollout=config.rollout, reward=config.reward, log_folder=str(folder / "logs"), name=f"engine-{i}")
            for i in range(config.rollout.engines)
        ]
        evaluation = asyncio.run(_evaluate(Fleet(specs, places.of("engine")), evaluator))
    with Tracker(config.tracking, folder, config.model_dump(mode="json"), None) as tracker:
        tracker.log(0, evaluation.metrics)
        if config.tracking.sample_every and evaluation.groups:
            tracker.table(0, "evaluation", *sample_table(evaluation.groups, tokenizer_of(config.model), config.tracking.samples))
    return evaluation


async def _evaluate(fleet: Fleet, evaluator: Evaluator) -> Evaluation:
    async def heal() -> None:
        for engine_id in fleet.dead_ids:
            await fleet.replace(engine_id)
            fleet.admit(engine_id)

    try:
        await fleet.start()
        return await evaluator.run(fleet, heal)
    finally:
        await fleet.close()
