"""What `miles rl` and `miles distill` are made of: builds the parts of a run from its recipe, starts them together, and ends them for certain."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from algorithms import registry
from miles.config import Resolved
from miles.core.checkpoint.store import CheckpointStore
from miles.core.model.load import end_tokens, prompt_room, tokenizer_of
from miles.data.prompts import PromptDataset, PromptStream
from miles.run.clock import Clock
from miles.run.cluster import Places, cluster
from miles.run.demands import EVALUATION, rl_demands
from miles.run.engines import Staff
from miles.run.evaluate import Evaluation, Evaluator, sampling_params
from miles.run.evaluation_fleet import FIRST_APART, BothFleets, EvaluationFleet
from miles.run.folder import held
from miles.run.live import Live
from miles.run.prefix_overlap import PrefixOverlap
from miles.run.reader import check_reader
from miles.run.recipe import DistillRecipe, RLRecipe
from miles.run.resume import first_step, position
from miles.run.samples import sample_table
from miles.run.teacher import check_teacher
from miles.run.teaching import Teaching, teaching_of
from miles.tracking.tracker import Tracker
from rollout.actor import RolloutSpec
from rollout.buffer import Buffer
from rollout.claim_table import Outcome
from rollout.claims import Claims
from rollout.engines.contracts import SamplingParams
from rollout.fleet import Actors, Fleet
from rollout.producer import Producer, Taken
from rollout.rewards.registry import check_columns
from rollout.rewards.steps import StepCutter
from trainer.actor import TrainerGroup, TrainerRanks
from trainer.contracts import StepResult
from weight_sync.transaction import PublishResult, UpdateAborted, WeightSync

logger = logging.getLogger(__name__)

ON_ONE_NODE = ("tensor", "views")
"""Transports through memory that trainer and engines share."""

PUBLISH_ATTEMPTS = 3
REVIVE_ATTEMPTS = 3


@dataclass(kw_only=True)
class RLRun:
    """The parts of a run, and its one position: `version`, the number of training steps behind the current weights."""

    recipe: RLRecipe
    folder: Path
    trainer: TrainerGroup
    fleet: Fleet
    producer: Producer
    sync: WeightSync
    evaluator: Evaluator | None
    checkpoints: CheckpointStore
    tracker: Tracker
    live: Live
    tokenizer: Any
    resume: bool
    teaching: Teaching | None = None
    overlap: PrefixOverlap | None = None
    apart: EvaluationFleet | None = None
    staff: Staff | None = None
    version: int = 0
    steps: int = 0

    async def start(self) -> None:
        """Bring trainer and engines up side by side; on resume, restore the last checkpoint and bring the engines to its version."""
        more = [*([self.teaching.start()] if self.teaching is not None else []), *([self.apart.fleet.start()] if self.apart is not None else [])]
        await asyncio.gather(self.trainer.start(), self.fleet.start(), *more)
        if not self.resume:
            return
        latest = self.checkpoints.latest()
        if latest is not None:
            state = await self.trainer.load(latest)
            self.version = int(state["version"])
            self.producer.load_state_dict(state["producer"])
        self.sync.rewind(self.version)
        for engine_id in self.fleet.engine_ids:
            if (why := await self.catch_up(engine_id)) is not None:
                self.fleet.mark_dead(engine_id, why)
        owed = None if latest is None else state.get("evaluating")
        if owed is not None and self.apart is not None:
            await self.apart.make_up(int(owed), self.version)

    async def take(self, clock: Clock) -> Taken:
        """The batch that version + 1 is trained on, with what a teacher outside of the trainer says of it."""
        if self.staff is not None:
            await self.staff.settle()
        if self.overlap is not None:
            await self.overlap.draw_memory(self.folder)
        with clock("rollout_wait"):
            taking = self.producer.take(self.version)
            batch = await (taking if self.overlap is None else self.overlap.beside(taking))
        if self.overlap is not None:
            with clock("prefix_wait"):
                await self.overlap.ended()
        if self.teaching is None:
            return batch
        with clock("teacher"):
            return replace(batch, groups=await self.teaching.teach(batch.groups))

    async def publish(self) -> PublishResult:
        """Bring every engine to the trainer's weights as version + 1. Engines that die on the way are left behind; where none
        is left, now or because they died while the trainer worked, fresh ones are started, which this same update brings up to date.

        Raises:
            UpdateAborted: the update was refused though no engine died, or engines kept dying.
        """
        for _ in range(PUBLISH_ATTEMPTS):
            if not self.fleet.engine_ids:
                for engine_id in self.fleet.dead_ids:
                    await self.fleet.replace(engine_id)
                    self.fleet.admit(engine_id)
            try:
                published = await self.sync.publish(self.version + 1)
            except UpdateAborted as aborted:
                if not aborted.dead:
                    raise
                last = aborted
                self._bury(aborted.dead)
                continue
            self.version += 1
            self._bury(published.dead)
            return published
        raise last

    def check_on_policy(self, trained: StepResult) -> None:
        """With `true_on_policy`, the engine's record and the trainer's scores are equal bit for bit, or the run stops."""
        worst = trained.metrics.get("mismatch/logprob_abs_max", 0.0)
        if self.recipe.model.true_on_policy and worst != 0.0:
            raise RuntimeError(f"true_on_policy: engine and trainer log-probs differ by {worst:.3e} at version {self.version}")

    async def heal(self) -> None:
        """Replace dead engines; each serves only after it holds the weights of the current version. The trainer must be idle.

        Raises:
            RuntimeError: an engine died REVIVE_ATTEMPTS times on the way there.
        """
        for engine_id in self.fleet.dead_ids:
            await self._revive(engine_id)

    async def _revive(self, engine_id: int) -> None:
        for _ in range(REVIVE_ATTEMPTS):
            await self.fleet.replace(engine_id)
            why = await self.catch_up(engine_id)
            if why is None:
                self.fleet.admit(engine_id)
                return
            logger.warning("engine %d died while it took up version %d: %s", engine_id, self.version, why)
        raise RuntimeError(f"engine {engine_id} died {REVIVE_ATTEMPTS} times in a row while it took up version {self.version}, the last time by: {why}")

    async def catch_up(self, engine_id: int) -> str | None:
        """Bring a fresh engine to the current version. None: it serves that; else what it died of."""
        if self.version == 0:
            return None  # it holds version 0 already
        try:
            return (await self.sync.catch_up(engine_id)).dead.get(engine_id)
        except UpdateAborted as aborted:
            if engine_id not in aborted.dead:
                raise
            return aborted.dead[engine_id]

    def _bury(self, dead: Mapping[int, str]) -> None:
        for engine_id, why in dead.items():
            self.fleet.mark_dead(engine_id, why)

    async def evaluate(self, *, at_start: bool = False) -> Evaluation | None:
        """Evaluate when the recipe says that it is time."""
        config = self.recipe.evaluate
        if self.evaluator is None or not config.every:
            return None
        due = config.at_start if at_start else self.version % config.every == 0 or self.version == self.steps
        if self.apart is not None:
            evaluation = await self.apart.begin(self.version) if due else self.apart.finished(self.version)
        else:
            evaluation = await self.evaluator.run(self.fleet, self.heal) if due else None
        if evaluation is None:
            return None
        if self.recipe.distillation is not None:
            groups = evaluation.groups if self.teaching is None else await self.teaching.teach(evaluation.groups)
            evaluation.metrics["eval/distill_kl"] = await self.trainer.divergence([s for g in groups for s in g.trainable])
        self._show(evaluation)
        if at_start:
            self.tracker.log(0, evaluation.metrics)
            self.live.update(0, evaluation.metrics)
        return evaluation

    def _show(self, evaluation: Evaluation) -> None:
        if self.recipe.tracking.sample_every and evaluation.groups:
            self.tracker.table(self.version, "evaluation", *sample_table(evaluation.groups, self.tokenizer, self.recipe.tracking.samples))

    async def checkpoint(self) -> None:
        """Start writing a checkpoint when it is time and there is none of this version."""
        if self.checkpoints.due(self.version, every=self.recipe.checkpoint.every, last=self.steps):
            state = {"producer": self.producer.state_dict(), "evaluating": None if self.apart is None else self.apart.owed}
            await self.trainer.save(self.checkpoints.begin(self.version), position(self.recipe, self.version) | state)

    def record(self, clock: Clock, batch: Taken, trained: StepResult, published: PublishResult, evaluation: Evaluation | None) -> None:
        metrics = clock.metrics() | batch.counts | trained.metrics | (evaluation.metrics if evaluation else {})
        responses = sum(s.response_length for g in batch.groups for s in g.trainable)
        metrics |= {
            "version/trained": float(self.version),
            "weight_sync/bytes": float(published.bytes),
            "groups/trained": float(len(batch.groups)),
            "engines/up": float(len(self.fleet.engine_ids)),
            "throughput/generated_tokens_per_s": responses / metrics["seconds/step"],
            "throughput/trained_tokens_per_s": sum(len(s.tokens) for g in batch.groups for s in g.trainable) / metrics["seconds/train"],
        }
        self.tracker.log(self.version, metrics)
        self.live.update(self.version, metrics)
        every = self.recipe.tracking.sample_every
        if every and (self.version % every == 0 or self.version == 1):
            self.tracker.table(self.version, "samples", *sample_table(batch.groups, self.tokenizer, self.recipe.tracking.samples))

    async def finish(self) -> None:
        """Write the last checkpoint and wait for it, and export."""
        await self.checkpoint()
        if self.overlap is not None:
            await self.overlap.draw_memory(self.folder)
        if self.apart is not None and (evaluation := await self.apart.end(self.version)) is not None:
            self._show(evaluation)
            self.tracker.log(self.version, evaluation.metrics)
            self.live.update(self.version, evaluation.metrics)
        ended = self.producer.claims.ended
        if given_up := ended[Outcome.FAILED] + ended[Outcome.EXHAUSTED]:
            told = ", ".join(f"{count} {outcome}" for outcome, count in ended.items())
            logger.warning("%d prompts were given up after rollout.max_attempts = %d: of all that ended, %s", given_up, self.recipe.rollout.max_attempts, told)
        await self.trainer.wait_saved()
        if self.recipe.checkpoint.export:
            await self.trainer.export(self.folder / "model")
            if self.recipe.lora is not None:
                await self.trainer.export_adapter(self.folder / "adapter")

    async def close(self) -> None:
        """End every part, also when another one fails to end."""
        async with AsyncExitStack() as parts:  # the last in is closed first
            parts.push_async_callback(self.trainer.close)
            parts.push_async_callback(self.fleet.close)
            if self.apart is not None:
                parts.push_async_callback(self.apart.close)
            if self.teaching is not None:
                parts.push_async_callback(self.teaching.close)
            parts.push_async_callback(self.sync.close)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the tenants of a run have in common, and whose part of it this is."""

    tenant: str
    places: Places
    ranks: TrainerRanks
    engines: Actors


@contextmanager
def assemble(recipe: Resolved[RLRecipe], *, resume: bool, shared: Shared | None = None) -> Iterator[RLRun]:
    """Build every part of `recipe`'s run. Objective and data are looked up and checked before Ray starts; on the way out everything ends.

    Args:
        shared: the processes that this run is one tenant of; None: it starts its own.
    """
    config = recipe.config
    # The trainer looks them up too, but late and in a process of its own.
    registry.advantage(config.algorithm)
    registry.loss(config.algorithm)
    folder = Path(config.run.folder)
    tokenizer = tokenizer_of(config.model)
    if config.reward.steps:
        StepCutter(config.reward.steps, tokenizer)
    if isinstance(config, DistillRecipe):
        check_teacher(config, tokenizer)
    if config.critic is not None and config.critic.path is not None:
        cure = "Use a model of the policy's family, or leave critic.path out"
        check_reader("critic.path", config.critic.path, config.model, tokenizer, whose="policy", cure=cure)
    room = prompt_room(config.model, config.rollout.max_new_tokens, "rollout.max_new_tokens")
    dataset = PromptDataset.load(config.data, tokenizer, room)
    check_columns(config.reward, dataset, "data")
    stream = PromptStream(dataset, config.run.seed)
    stream.check_step(config.rollout.prompts_per_step, config.rollout.extra_prompts)
    rewarded = bool(config.reward.functions)
    evaluator = Evaluator.load(config.evaluate, config.model, config.run.seed, rewarded=rewarded) if config.evaluate.every else None
    if evaluator is not None:
        check_columns(config.reward, evaluator.prompts, "evaluate.data")
    stop_ids = end_tokens(config.model, tokenizer, config.rollout.stop)
    checkpoints = CheckpointStore(folder / "checkpoints", keep=config.checkpoint.keep)
    with ExitStack() as parts:
        parts.enter_context(held(config.run))
        begin = first_step(config, checkpoints, stream.fingerprint) if resume else None
        places = parts.enter_context(placed(config)) if shared is None else shared.places
        tracker = parts.enter_context(Tracker(config.tracking, folder, config.model_dump(mode="json"), begin))
        kind = "rl" if config.distillation is None else "distill"
        live = parts.enter_context(Live(kind if shared is None else f"{kind} {shared.tenant}", config.run.steps, redrawn=shared is None))
        yield _build(config, folder, places, tracker, live, stream, evaluator, stop_ids, checkpoints, tokenizer, resume, shared)


def placed(config: RLRecipe) -> AbstractContextManager[Places]:
    """Ray, with a place for each process of a run. Raises ConfigError as `cluster`."""
    return cluster(config.cluster, rl_demands(config), one_node=config.weight_sync.transport in ON_ONE_NODE)


def _build(
    config: RLRecipe,
    folder: Path,
    places: Places,
    tracker: Tracker,
    live: Live,
    stream: PromptStream,
    evaluator: Evaluator | None,
    stop_ids: tuple[int, ...],
    checkpoints: CheckpointStore,
    tokenizer: Any,
    resume: bool,
    shared: Shared | None,
) -> RLRun:
    rollout = config.rollout

    def spec(name: str, number: int) -> RolloutSpec:
        logs = str(folder / "logs")
        return RolloutSpec(model=config.model, rollout=rollout, reward=config.reward, log_folder=logs, name=f"{name}-{number}", lora=config.served_lora)

    def engines(role: str, name: str, count: int) -> Fleet:
        return Fleet([spec(name, i) for i in range(count)], places.of(role), None if shared is None else shared.engines)

    fleet = engines("engine", "engine", rollout.engines)
    others = engines(EVALUATION, "evaluation", config.evaluate.engines) if config.evaluate.engines else None
    trainer = TrainerGroup(
        model=config.model,
        trainer=config.trainer_section,
        algorithm=config.algorithm,
        checkpoint=config.checkpoint,
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
        seed=config.run.seed,
        total_steps=config.run.steps * config.trainer.optimizer_steps_per_batch,
        places=places.of("trainer rank"),
        ranks=None if shared is None else shared.ranks,
        tenant="" if shared is None else shared.tenant,
        distill=config.distillation,
        critic=config.critic,
        lora=config.lora,
        prefix_overlap=config.run.prefix_overlap,
    )
    sync = WeightSync(
        config.weight_sync,
        folder / "weight_sync.jsonl",
        trainer,
        BothFleets(fleet, others, FIRST_APART),
        address=places.address("trainer rank"),
        backend="nccl" if config.trainer.gpus_per_rank and rollout.gpus_per_engine else "gloo",
    )

    def sampler(claim_id: int) -> tuple[SamplingParams, ...]:
        seeds = np.random.SeedSequence([config.run.seed, 0, claim_id]).generate_state(rollout.samples_per_prompt, np.uint64) >> np.uint64(1)
        return tuple(sampling_params(rollout, stop_ids, int(seed)) for seed in seeds)

    async def heal() -> None:
        await run.heal()

    producer = Producer(
        stream=stream,
        claims=Claims(max_attempts=rollout.max_attempts),
        buffer=Buffer(),
        fleet=fleet,
        sampler=sampler,
        prompts_per_step=rollout.prompts_per_step,
        max_staleness=config.run.max_staleness,
        timeout_s=rollout.timeout_s,
        dynamic_sampling=config.algorithm.dynamic_sampling,
        max_sampling_rounds=config.algorithm.max_sampling_rounds,
        extra_prompts=rollout.extra_prompts,
        made_by=made_by(config),
        heal=heal,
    )
    run = RLRun(
        recipe=config,
        folder=folder,
        trainer=trainer,
        fleet=fleet,
        producer=producer,
        sync=sync,
        evaluator=evaluator,
        checkpoints=checkpoints,
        tracker=tracker,
        live=live,
        tokenizer=tokenizer,
        resume=resume,
        teaching=teaching_of(config, tokenizer, places, folder),
        steps=config.run.steps,
    )
    if others is not None:
        assert evaluator is not None, "the recipe is checked for evaluate.every"
        run.apart = EvaluationFleet(evaluator, others, FIRST_APART, run.catch_up)
    if config.run.prefix_overlap:
        run.overlap = PrefixOverlap(trainer, producer, rollout.samples_per_prompt, lambda: run.version)
        producer.submitted = run.overlap.submitted
    if shared is None:
        one_node = config.weight_sync.transport in ON_ONE_NODE
        run.staff = Staff(folder, fleet, partial(spec, "engine"), places.node("trainer rank") if one_node else None, run.catch_up)
    return run


def made_by(config: RLRecipe) -> str:
    """Digest of what must be the same of a group that was made before a resume: rewards and their steps, the temperature that the trainer scores at,
    the size of groups."""
    options = [config.reward.model_dump(mode="json", include={"functions", "steps"}), config.rollout.temperature, config.rollout.samples_per_prompt]
    return hashlib.blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=8).hexdigest()
