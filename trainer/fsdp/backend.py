"""The `fsdp` trainer backend: any transformers causal language model, trained on packed rows under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from algorithms import registry
from algorithms.config import AlgorithmConfig
from algorithms.contracts import Counts, LossOutput
from algorithms.distillation.config import DistillConfig
from algorithms.preference.config import PairConfig, PreferenceConfig, RewardModelConfig
from miles.core.checkpoint import reader, rng
from miles.core.checkpoint.writer import CheckpointWriter
from miles.core.model.config import LoraConfig, ModelConfig
from miles.core.model.load import longest_sequence
from miles.core.model.routing import Routers
from miles.core.model.sharded import reshard
from miles.core.planning.hardware import hardware_of
from miles.core.planning.residency import Residency
from miles.core.planning.workload import workload_of
from miles.data.types import Group, Sample
from trainer.config import CriticConfig, TrainerConfig
from trainer.contracts import ClaimedPrompt, StepResult
from trainer.fsdp.critic import Critic, build_critic
from trainer.fsdp.distill import Distiller, build_distiller
from trainer.fsdp.early import EarlyPrefills
from trainer.fsdp.export import AdapterExporter, Exporter
from trainer.fsdp.fits import check_divided
from trainer.fsdp.home import SharedParameters
from trainer.fsdp.mesh import open_mesh
from trainer.fsdp.model import build_model, compute_dtype_of
from trainer.fsdp.optimizer import Optimizer
from trainer.fsdp.pairs import PairLoss
from trainer.fsdp.scoring import BaseScorer, Scorer
from trainer.fsdp.update import take_step
from trainer.objective import Objective, result_of, sft_loss, tokens_of
from trainer.rows.batch import Batch, count, weights_of
from trainer.rows.meters import Meters
from trainer.rows.pairs import mismatched
from trainer.rows.row import Row, RowLoss
from trainer.rows.schedule import Update
from trainer.rows.share import MicroBatch, share
from trainer.split_forward import hilore
from trainer.split_forward.activations import Activations
from trainer.split_forward.hilore import HiLoRe, Planned
from trainer.split_forward.residency import can_plan, local_bytes
from trainer.split_forward.share import PromptSharing
from weight_sync.contracts import Home, TensorSpec
from weight_sync.slices import Slice


class FSDPBackend:
    """One rank. The default process group is there already when `world` > 1 or the model computes in bfloat16.

    Args:
        algorithm: the objective of `step_rl`; None for a trainer that only does `step_sft`.
        pairs: the objective of `step_pairs`, or None. For a reward model the output head is another from the start, and `step_pairs`
            and `export` are all there is to do with it.
        distill: the teacher that `step_rl` also learns from, or None.
        critic: the critic that `step_rl` also trains, or None.
        lora: adapters that are trained in place of the model's own weights. The engines get nothing else, checkpoints hold nothing
            else, and the reference is the model without them.
        base: with `lora`, the model of another backend of this rank, of which all is shared but the adapters.
        prefix_overlap: prompts are computed as soon as they are known, by `prefill`, which needs `trainer.prompt_sharing`.
        temperature: the sampling temperature, at which `step_rl` and `logprobs` score. `step_sft` scores at 1.
        max_new_tokens: the longest response, Dr.GRPO's constant.
        total_steps: optimizer steps of the whole run, for the learning-rate schedule.
        master_dtype: of parameters and optimizer; tests use float64.
    Attributes:
        version: training steps behind the current weights, which is their version; `staleness/*` is measured against it.
    """

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        algorithm: AlgorithmConfig | None,
        *,
        temperature: float,
        max_new_tokens: int,
        seed: int,
        total_steps: int,
        rank: int,
        world: int,
        device: torch.device | None = None,
        master_dtype: torch.dtype = torch.float32,
        distill: DistillConfig | None = None,
        pairs: PairConfig | None = None,
        critic: CriticConfig | None = None,
        lora: LoraConfig | None = None,
        prefix_overlap: bool = False,
        base: PreTrainedModel | None = None,
    ) -> None:
        self._config, self._trainer, self._algorithm = model, trainer, algorithm
        self._temperature, self._max_new_tokens, self._seed = temperature, max_new_tokens, seed
        self.rank, self.world = rank, world
        self.device = device or torch.device("cpu")
        self._mesh = open_mesh(trainer, rank, world, self.device)
        rng.seed_all(seed, rank)
        check_divided(model, trainer, lora)
        build = partial(build_model, model, master_dtype=master_dtype, mesh=self._mesh, device=self.device, compiled=trainer.compile)
        assert base is None or lora is not None, "weights that are trained cannot be shared"
        rewards = isinstance(pairs, RewardModelConfig)
        if rewards and lora is not None:
            raise ValueError("[lora] trains a policy; a reward model is trained whole: leave [lora] out")
        self._activations = None if trainer.activations == "keep" else Activations()
        reward_seed = seed if rewards else None
        self.model = build(activations=self._activations, reward_seed=reward_seed, lora=lora, lora_seed=seed, frozen=trainer.frozen, base=base)
        self._hilore: HiLoRe | None = None
        if trainer.activations == "hilore":
            if pairs is not None or distill is not None:
                what = "pairs" if pairs is not None else "a teacher"
                raise ValueError(f"trainer.activations = 'hilore' weighs tokens by a loss on log-probs, and this trainer learns from {what}: use 'recompute'")
            assert self._activations is not None
            self._activations.width = hilore.check(self.model, longest_sequence(model))
            budgets = trainer.activation_memory, trainer.activation_risk
            self._hilore = HiLoRe(self.model, self._activations, *budgets, world=world, threads=trainer.threads, device=self.device)
        self._chunk = trainer.chunk(self.model.config.get_text_config().vocab_size)
        self._policy = Scorer(self.model, self._chunk, self.device, Routers(self.model) if trainer.balance_coef else None)
        if trainer.balance_coef and (pairs is not None or distill is not None):
            what = "pairs" if pairs is not None else "a teacher"
            raise ValueError(f"trainer.balance_coef = {trainer.balance_coef:g} goes with rewards and SFT, and this trainer learns from {what}: set it to 0")
        self._workload, self._hardware = workload_of(self.model), hardware_of(self.device.type, trainer.threads)
        self._sharing: PromptSharing | None = None
        if trainer.prompt_sharing:
            if rewards or distill is not None:
                what = "a reward model" if rewards else "a teacher over whole rows"
                raise ValueError(f"trainer.prompt_sharing = true computes log-probs, and this trainer needs {what}: set it to false")
            capacity = trainer.max_tokens_per_microbatch
            self._sharing = PromptSharing(
                self.model, self._mesh.data_rank, self._mesh.data_world, capacity, trainer.threads, self.device, compute_dtype_of(model, master_dtype)
            )
        self._reference: Scorer | None = None
        self._objective = None if algorithm is None else Objective(algorithm, max_new_tokens)
        if (algorithm is not None and algorithm.kl_coef > 0) or (isinstance(pairs, PreferenceConfig) and pairs.needs_reference):
            if lora is None:
                self._reference = Scorer(build().requires_grad_(False), self._chunk, self.device)
            else:
                self._reference = BaseScorer(self.model, self._chunk, self.device)
        self._pairs = None if pairs is None else PairLoss(config=pairs, model=self.model, policy=self._policy, reference=self._reference)
        self._distiller: Distiller | None = None
        if algorithm is not None and distill is not None:
            self._distiller = build_distiller(
                distill,
                algorithm,
                model,
                student=self.model,
                temperature=temperature,
                chunk=self._chunk,
                master_dtype=master_dtype,
                mesh=self._mesh,
                device=self.device,
            )
        self._early: EarlyPrefills | None = None
        if prefix_overlap:
            assert self._sharing is not None, "the recipe is checked for prompt_sharing"
            assert algorithm is not None, "and is one of reinforcement learning"
            assert trainer.optimizer_steps_per_batch == 1, "a second update would have other weights than the prompts were computed with"
            self._early = EarlyPrefills(
                self._sharing,
                self._policy,
                self._reference,
                longest=max_new_tokens,
                apart=algorithm.dynamic_sampling,
                temperature=temperature,
                entropy_gradient=algorithm.entropy_coef != 0,
            )
        self._optimizer = Optimizer(self.model, trainer, total_steps)
        self._critic: Critic | None = None
        if critic is not None:
            self._critic = build_critic(critic, model, trainer, master_dtype=master_dtype, mesh=self._mesh, device=self.device, total_steps=total_steps)
        dtype = compute_dtype_of(model, master_dtype)
        self._exporter = Exporter(self.model, dtype, rank, rewards, lora)
        self._adapters = None if lora is None else AdapterExporter(self.model, lora, dtype, rank)
        self._sent: Exporter | AdapterExporter = self._exporter
        if self._adapters is not None and lora is not None and lora.served == "apart":
            self._sent = self._adapters
        self._shared: SharedParameters | None = None
        self._writer = CheckpointWriter(rank, world)
        self._choices: dict[Row, Planned] = {}
        self.version = 0

    def prefill(self, prompts: Sequence[ClaimedPrompt], open_claims: Set[int], version: int) -> None:
        """See `TrainerBackend`. What it leaves on the device is bounded by `trainer.max_tokens_per_microbatch`, as all graphs are."""
        if self._early is None:
            raise ValueError("this trainer was built without prefix_overlap: it computes prompts with their answers")
        assert version == self.version, f"engines answer with version {version}, but the trainer's weights are version {self.version}"
        self._early.prefill(prompts, open_claims)

    def residency(self, budget: int | None) -> Residency | None:
        if self._early is None or self._activations is not None or not can_plan(self.model):
            return None
        if self.device.type == "cuda":
            budget = torch.cuda.mem_get_info(self.device)[1]
        constants = {"AdamW": local_bytes(list(self._optimizer.tensors().values()))}
        if self._critic is not None:
            constants["critic"] = local_bytes([*self._critic.model.parameters(), *self._critic.optimizer.tensors().values()])
        return self._early.residency(self._chunk, constants, budget)

    def step_rl(self, groups: Sequence[Group]) -> StepResult:
        """See `TrainerBackend`. Scores at a step's start are needed for later updates only: the first one's own are those."""
        objective = self._objective
        if objective is None:
            raise ValueError("this trainer was built without an [algorithm] section: it can do step_sft only")
        batch = Batch(groups, self._trainer.optimizer_steps_per_batch)
        if self._early is not None:
            self._early.meet(groups)
        rewards, more = batch.rewards, dict[str, float]()
        if objective.reference_in_reward:
            reference = self._reference
            assert reference is not None, "kl_coef > 0 loads a reference"
            rewards, more = objective.penalised(batch, self._scores(batch.samples, lambda row: reference.score(row, self._temperature)))
        if self._critic is not None:
            rewards = replace(rewards, values_N=self._scores(batch.samples, self._critic.score, whole=True))
        found = objective.advantages(batch, rewards)
        advantages = found.advantages_N.split(batch.lengths)
        updates = [self._share(batch.samples, places) for places in batch.updates]
        rows = [[self._policy.row(micro, advantages) for micro in update] for update in updates]
        if self._critic is not None:
            shares = [self._share(batch.samples, places, whole=True) for places in batch.updates]
            more |= self._critic.step(batch, shares, [[self._policy.row(micro) for micro in own] for own in shares], rewards, found, self._mesh)
        policy_waits = self._critic is not None and self._critic.alone(self.version)
        for number, update in enumerate(rows if not policy_waits else []):
            for row in update:
                if self._reference is not None and objective.reference_in_loss:
                    row.reference_logprobs_N = self._reference.score(row, self._temperature)
                if number > 0 and objective.recompute:
                    row.start_logprobs_N = self._policy.score(row, self._temperature)
        meters = Meters(self.device)
        results = []
        for places, update in zip(batch.updates, rows, strict=True):
            if policy_waits:
                results.append(self._optimizer.skip())
                continue
            counts = objective.counts([batch.samples[i] for i in places], [advantages[i] for i in places])
            loss = partial(objective.loss, counts=counts, meters=Meters(self.device))
            self._choose(update, counts.tokens, loss, self._policy_loss, sampled=True)
            share_of = partial(self._rl_loss, counts=counts, meters=meters)
            results.append(self._update(update, counts.tokens, partial(self._balanced, counts=counts, loss=share_of), meters))
            # Only before the first update are the weights those that the engines sampled from.
            meters.comparing = False
        metrics = self._reduced(meters, int(batch.rewards.length_S.sum())) | batch.metrics(self.version) | more
        result = objective.steered(result_of(results, metrics))
        if self._early is not None:
            self._early.clear()
        self.version += 1
        return result

    def step_sft(self, samples: Sequence[Sample]) -> StepResult:
        counts, weight_S = count(samples, self._max_new_tokens), weights_of(samples)
        if weight_S is not None:
            counts = replace(counts, weight=sum(w * int(s.loss_mask.sum()) for w, s in zip(weight_S.tolist(), samples, strict=True)))
        meters = Meters(self.device)
        # Weights travel in the advantages' place.
        weights = None if weight_S is None else [w.expand(s.response_length) for w, s in zip(weight_S, samples, strict=True)]
        rows, loss = self._rows(samples, values=weights), partial(sft_loss, counts=counts)
        self._choose(rows, counts.tokens, loss, self._sft_loss, sampled=False)
        update = self._update(rows, counts.tokens, partial(self._balanced, counts=counts, loss=partial(self._sft_loss, loss=loss)), meters)
        result = result_of([update], self._reduced(meters, counts.tokens) | {"tokens/trained": float(counts.tokens)})
        self.version += 1
        return result

    def step_pairs(self, samples: Sequence[Sample]) -> StepResult:
        pairs = len(samples) // 2
        objective, rows, scored = self._begin_pairs(samples)
        meters = Meters(self.device)
        update = self._update(rows, pairs, partial(objective, total=pairs), meters)
        tokens = count(samples, self._max_new_tokens).tokens
        more = scored | {"pairs/trained": float(pairs), "tokens/trained": float(tokens)}
        result = result_of([update], self._reduced(meters, pairs) | more)
        self.version += 1
        return result

    def evaluate_pairs(self, samples: Sequence[Sample]) -> dict[str, float]:
        pairs = len(samples) // 2
        objective, rows, _ = self._begin_pairs(samples)
        meters = Meters(self.device)
        with torch.no_grad():
            for row in rows:
                out = objective(row, pairs)
                self._policy.settle(row)
                meters.add("preference/loss", out.loss * pairs)
                for name, value in out.sums.items():
                    meters.add(name, value)
        reshard(self.model)
        found = meters.reduced(pairs, self._mesh.data_world, self._mesh.data_group)
        return {f"eval/preference_{name}": found[f"preference/{name}"] for name in ("accuracy", "margin", "loss")}

    def logprobs(self, samples: Sequence[Sample], reference: bool = False) -> list[list[float]]:
        if reference and self._reference is None:
            raise ValueError("there is no reference model: it is loaded when algorithm.kl_coef > 0")
        scorer = self._reference if reference and self._reference is not None else self._policy
        scores_N = self._scores(samples, lambda row: scorer.score(row, self._temperature))
        return [part.tolist() for part in scores_N.split([s.response_length for s in samples])]

    def divergence(self, samples: Sequence[Sample]) -> float:
        if self._distiller is None:
            raise ValueError("there is no teacher: it is loaded where the recipe has a [distill] section")
        total = self._mesh.summed(self._distiller.total(self._rows(samples)))
        return float(total) / max(count(samples, self._max_new_tokens).tokens, 1)

    def weight_specs(self) -> Sequence[TensorSpec]:
        """The adapters alone where engines have the base beside them."""
        return self._sent.specs()

    def weight_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        return self._sent.tensors(names)

    def weight_slices(self) -> Sequence[Slice]:
        return self._sent.mine.slices()

    def weight_slice(self, piece: Slice) -> Tensor:
        return self._sent.mine.tensor(piece)

    def weight_home(self, path: str | None) -> Home:
        if self._shared is None:
            self._shared = self._exporter.shared(self.model)
        return self._shared.home(path)

    def export(self, folder: Path) -> None:
        self._exporter.write(self._config, Path(folder))
        if self.world > 1:
            dist.barrier()

    def export_adapter(self, folder: Path) -> None:
        if self._adapters is None:
            raise ValueError("there is no adapter: this trainer was built without a [lora] section")
        self._adapters.write(self._config, Path(folder))
        if self.world > 1:
            dist.barrier()

    def save(self, folder: Path, extra: dict[str, object], *, keep: int | None = None, asynchronous: bool = True) -> None:
        state: dict[str, object] = {"optimizer_step": self._optimizer.steps, "version": self.version}
        if self._objective is not None:
            state |= self._objective.state()
        if self._hilore is not None:
            state["activations"] = self._hilore.state()
        if self._critic is not None:
            state["critic_optimizer_step"] = self._critic.optimizer.steps
        self._writer.save(Path(folder), self._state(), state, extra, keep=keep, asynchronous=asynchronous)

    def wait_saved(self) -> None:
        self._writer.wait()

    def load(self, folder: Path) -> dict[str, object]:
        self._moving()
        reshard(self.model)
        if self._early is not None:
            self._early.clear()
        if self._critic is not None:
            reshard(self._critic.model)
        state, extra = reader.load(Path(folder), self._state(), rank=self.rank, world=self.world, seed=self._seed)
        self._optimizer.steps, self.version = int(state["optimizer_step"]), int(state["version"])
        if self._critic is not None:
            self._critic.optimizer.steps = int(state["critic_optimizer_step"])
        if self._objective is not None:
            self._objective.restore(state)
        if self._hilore is not None and "activations" in state:
            self._hilore.restore(state["activations"])
        return extra

    def sleep(self) -> None:
        """On CPU everything stays; on a GPU parameters and optimizer state move to the CPU."""
        self._move("cpu")

    def wake(self) -> None:
        self._move(self.device.type)

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and end the writer."""
        self._writer.close()

    def _begin_pairs(self, samples: Sequence[Sample]) -> tuple[PairLoss, list[Row], dict[str, float]]:
        """The objective, ready for these rows of `samples`, and what it says of the batch beforehand. Collective."""
        objective = self._pairs
        if objective is None:
            raise ValueError("this trainer was built without an objective on pairs: it cannot do step_pairs")
        rows = self._rows(samples, together=2)
        kto = isinstance(objective.config, PreferenceConfig) and objective.config.objective == "kto"
        return objective, rows, objective.begin(rows, self._rows(mismatched(samples)) if kto else [], self._mesh)

    def _rows(self, samples: Sequence[Sample], together: int = 1, values: Sequence[Tensor] | None = None) -> list[Row]:
        """This rank's rows of a batch that is taken at once; `values`, [R] of each sample, as advantages."""
        return [self._policy.row(micro, values) for micro in self._share(samples, range(len(samples)), together)]

    def _scores(self, samples: Sequence[Sample], score: Callable[[Row], Tensor], whole: bool = False) -> Tensor:
        """What `score` says of each response token of all `samples` end to end, float64 [N] on the CPU, equal on every rank. Collective."""
        flat_N = torch.zeros(sum(s.response_length for s in samples), dtype=torch.float64, device=self.device)
        own = flat_N.split([s.response_length for s in samples])
        for micro in self._share(samples, range(len(samples)), whole=whole):
            for index, part in micro.by_sample(score(self._policy.row(micro))):
                own[index].copy_(part)
        return self._mesh.summed(flat_N).cpu()

    def _share(self, samples: Sequence[Sample], places: Sequence[int], together: int = 1, whole: bool = False) -> list[MicroBatch]:
        """`whole`: for a model that must see whole sequences, whatever they share."""
        if self._early is not None and self._early.micros is not None and not whole:
            return self._early.micros
        if self._sharing is not None and not whole:
            return self._sharing.share(samples, places, together)
        budget = self._trainer.max_tokens_per_microbatch
        return share(samples, places, rank=self._mesh.data_rank, world=self._mesh.data_world, max_tokens=budget, together=together, cost=self._cost)

    def _cost(self, sample: Sample) -> float:
        return self._workload.sequence_seconds(len(sample.tokens), sample.response_length, self._hardware)

    def _choose(self, rows: Sequence[Row], total: int, loss: RowLoss, run: Callable[[Row, RowLoss], LossOutput], *, sampled: bool) -> None:
        """What layers keep of the rows of the update that follows. Collective."""
        self._choices = {}
        if self._hilore is not None and total:
            self._choices = dict(zip(rows, self._hilore.choices(rows, loss, run, sampled=sampled), strict=True))

    def _update(self, rows: list[Row], total: int, loss: Callable[[Row], LossOutput], meters: Meters) -> Update:
        chosen = self._hilore
        if chosen is None or not total:
            return take_step(self.model, self._optimizer, rows, total, loss, meters, "loss/total", self._policy.settle, self._no_reader)

        def by_choice(row: Row) -> LossOutput:
            chosen.choose(self._choices[row])
            return loss(row)

        update = take_step(self.model, self._optimizer, rows, total, by_choice, meters, "loss/total", self._policy.settle, self._no_reader)
        chosen.choose(None)
        for name, value in chosen.metrics().items():
            meters.add(name, torch.tensor(value * total / self._mesh.data_world, device=self.device))
        chosen.stepped(update.grad_norm)
        return update

    def _no_reader(self) -> None:
        """Synchronous on-policy training: nothing may read the weights of this version once they have moved, and engines that do will notice."""
        alive = len(self._policy.readers)
        assert not alive, f"{alive} prefills of version {self.version} are alive at the optimizer step"
        self._moving()

    def _moving(self) -> None:
        """Engines may read the weights where they lie."""
        if self._shared is not None:
            self._shared.moving()

    def _rl_loss(self, row: Row, counts: Counts, meters: Meters) -> LossOutput:
        objective = self._objective
        assert objective is not None
        if self._distiller is not None:
            compared = self._distiller.forward(row)
            tokens = tokens_of(row, compared.logprobs_N, compared.entropy_N, recompute=objective.recompute)
            meters.mismatch(tokens)
            return self._distiller.loss(tokens, compared, counts)
        return self._policy_loss(row, partial(objective.loss, counts=counts, meters=meters))

    def _balanced(self, row: Row, counts: Counts, loss: Callable[[Row], LossOutput]) -> LossOutput:
        """The row's loss, and its share of the balance of the experts' loads: a mean over the step's trained sequences."""
        out = loss(row)
        if not self._trainer.balance_coef:
            return out
        found, length_S = self._policy.routed(row)
        trained_S = row.sequence_length_S[: len(length_S)] > 0
        balance = (found.balance_S(length_S) * trained_S).sum() / counts.sequences
        return LossOutput(loss=out.loss + self._trainer.balance_coef * balance, sums=out.sums | {"experts/balance": balance.detach() * counts.tokens})

    def _policy_loss(self, row: Row, loss: RowLoss) -> LossOutput:
        assert self._algorithm is not None
        gradient, by_token = self._algorithm.entropy_coef != 0, registry.is_by_token(self._algorithm)
        return self._policy.loss(row, self._watched(loss), self._temperature, entropy=True, entropy_gradient=gradient, by_token=by_token)

    def _sft_loss(self, row: Row, loss: RowLoss) -> LossOutput:
        return self._policy.loss(row, self._watched(loss), 1.0, by_token=True)

    def _watched(self, loss: RowLoss) -> RowLoss:
        return loss if self._hilore is None else self._hilore.watched(loss)

    def _reduced(self, meters: Meters, total: int) -> dict[str, float]:
        return meters.reduced(total, self._mesh.data_world, self._mesh.data_group) | ({} if self._sharing is None else self._sharing.metrics())

    def _state(self) -> dict[str, Tensor]:
        weights = {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return weights | self._optimizer.tensors() | ({} if self._critic is None else self._critic.tensors())

    def _move(self, device: str) -> None:
        if self.device.type == "cpu" or self._mesh.offload:
            return
        critic = [] if self._critic is None else [(self._critic.model, self._critic.optimizer)]
        for model, optimizer in [(self.model, self._optimizer), *critic]:
            reshard(model)
            torch.nn.Module.to(model, torch.device(device))
            optimizer.to(device)
        if device == "cpu":
            torch.cuda.empty_cache()
