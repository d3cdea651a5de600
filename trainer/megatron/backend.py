"""The `megatron` trainer backend: Megatron-Core's tensor, pipeline, expert and data parallelism on packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from algorithms.config import AlgorithmConfig
from algorithms.contracts import Rewards, TokenAdvantages
from algorithms.distillation.config import DistillConfig
from algorithms.preference.config import PairConfig, PreferenceConfig, RewardModelConfig
from miles.core.checkpoint import rng
from miles.core.checkpoint.whole import whole
from miles.core.model.config import LoraConfig, ModelConfig
from miles.core.model.load import load_config
from miles.core.model.lora import merged, write_adapter
from miles.core.model.reward import reward_shell
from miles.data.packing import pack
from miles.data.taught import nothing
from miles.data.types import Group, Sample
from trainer.config import CriticConfig, TrainerConfig
from trainer.contracts import StepResult
from trainer.megatron import cpu
from trainer.megatron.architecture import architecture_of
from trainer.megatron.directory import write_directory
from trainer.megatron.layout import layout_of
from trainer.megatron.mesh import open_mesh, summed
from trainer.megatron.names import adapters_of
from trainer.objective import Objective, result_of, sft_loss
from trainer.rows.batch import Batch, count, weights_of
from trainer.rows.meters import Meters
from trainer.rows.pairs import loss_of_answers, loss_of_rewards, mismatched, moved_away
from trainer.rows.row import Row, RowLoss, row_of
from trainer.rows.schedule import Update
from trainer.rows.share import DUMMY, MicroBatch, share
from trainer.rows.values import learn_values, loss_of_values
from weight_sync.contracts import TensorSpec
from weight_sync.slices import Slice

cpu.redirect()  # before anything below imports Megatron-Core

from trainer.megatron import checkpoint  # noqa: E402
from trainer.megatron.distill import Distiller, build_distiller  # noqa: E402
from trainer.megatron.export import Exporter  # noqa: E402
from trainer.megatron.lora import shards_of  # noqa: E402
from trainer.megatron.policy import Model  # noqa: E402
from trainer.megatron.trained import Builder, Trained  # noqa: E402


class MegatronBackend:
    """One rank. The default process group is there already. Arguments and attributes as in `FSDPBackend`.

    Raises:
        ValueError: the model or the recipe asks for what this backend cannot do; the message names it.
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
    ) -> None:
        for option, value in (
            ("model.true_on_policy", model.true_on_policy or None),
            ("trainer.prompt_sharing", trainer.prompt_sharing or None),
        ):
            if value is not None:
                raise ValueError(f"{option} is not there for trainer.backend = 'megatron': use trainer.backend = 'fsdp'")
        self._config, self._trainer = model, trainer
        self._temperature, self._max_new_tokens, self._seed = temperature, max_new_tokens, seed
        self.rank, self.world = rank, world
        self.device = device or torch.device("cpu")
        self._hf_config = load_config(model.path, trust_remote_code=model.trust_remote_code)
        rewards = isinstance(pairs, RewardModelConfig)
        if rewards and lora is not None:
            raise ValueError("[lora] trains a policy; a reward model is trained whole: leave [lora] out")
        self.architecture = architecture_of(self._hf_config, values=rewards)
        layout = layout_of(trainer)
        self.architecture.check(layout)
        assert layout.ranks == world, (layout, world)
        self.mesh = open_mesh(layout, rank, trainer.timeout_s)
        rng.seed_all(seed, rank)
        self._dtype = torch.bfloat16 if model.dtype == "bfloat16" else master_dtype
        builder = Builder(
            path=model.path,
            hf_config=self._hf_config,
            architecture=self.architecture,
            mesh=self.mesh,
            device=self.device,
            master=master_dtype,
            compute=self._dtype,
            recompute=trainer.activations == "recompute",
            log_chunk=trainer.chunk(self.architecture.vocabulary),
            reward_seed=seed if rewards else None,
        )
        self._trained = builder.trained(trainer, total_steps, lora, seed)
        self._policy = self._trained.model
        self._objective = None if algorithm is None else Objective(algorithm, max_new_tokens)
        self._pairs = pairs
        self._reference: Model | None = None
        if (algorithm is not None and algorithm.kl_coef > 0) or (isinstance(pairs, PreferenceConfig) and pairs.needs_reference):
            self._reference = builder.frozen() if lora is None else builder.base(self._trained)
        self._distiller: Distiller | None = None
        if algorithm is not None and distill is not None:
            self._distiller = build_distiller(distill, algorithm, builder, temperature, trust_remote_code=model.trust_remote_code)
        self._critic: Trained | None = None
        self._critic_config = critic
        if critic is not None:
            self._critic = self._build_critic(critic, builder, total_steps)
        own = [chunk.module.tensors() for chunk in self._trained.chunks]
        self._exporter = Exporter(replace(self.architecture, trained_values=rewards), self.mesh, own, self._dtype)
        self._lora, self._adapters = lora, None
        if lora is not None:
            assert self._trained.adapters is not None
            self._adapters = Exporter(adapters_of(self.architecture, lora), self.mesh, self._trained.adapters, self._dtype)
        self._writer = checkpoint.Writer(rank, world)
        self.version = 0

    def step_rl(self, groups: Sequence[Group]) -> StepResult:
        """See `TrainerBackend`. Scores at a step's start are needed for later updates only: the first one's own are those."""
        objective = self._objective
        if objective is None:
            raise ValueError("this trainer was built without an [algorithm] section: it can do step_sft only")
        batch = Batch(groups, self._trainer.optimizer_steps_per_batch)
        rewards, more = batch.rewards, dict[str, float]()
        if objective.reference_in_reward:
            assert self._reference is not None, "kl_coef > 0 loads a reference"
            rewards, more = objective.penalised(batch, self._scores(batch.samples, self._reference))
        if self._critic is not None:
            rewards = replace(rewards, values_N=self._scores(batch.samples, self._critic.model))
        found = objective.advantages(batch, rewards)
        advantages = found.advantages_N.split(batch.lengths)
        updates = [self._share(batch.samples, places, advantages) for places in batch.updates]
        if self._critic is not None:
            more |= self._step_critic(self._critic, batch, updates, rewards, found)
        policy_waits = self._critic_config is not None and self.version < self._critic_config.head_start
        for number, rows in enumerate(updates if not policy_waits else []):
            if self._reference is not None and objective.reference_in_loss:
                for row, scores_N in self._logprobs_by_row(self._reference, rows, self._temperature):
                    row.reference_logprobs_N = scores_N
            if self._distiller is not None:
                self._distiller.prepare(rows)
            if number > 0 and objective.recompute:
                for row, scores_N in self._logprobs_by_row(self._policy, rows, self._temperature):
                    row.start_logprobs_N = scores_N
        meters = Meters(self.device)
        results = []
        for places, rows in zip(batch.updates, updates, strict=True):
            if policy_waits:
                results.append(self._trained.optimizer.skip())
                continue
            counts = objective.counts([batch.samples[i] for i in places], [advantages[i] for i in places])
            loss, through_entropy = partial(objective.loss, counts=counts, meters=meters), objective.config.entropy_coef != 0
            if self._distiller is not None:
                loss = partial(self._distiller.of_row, counts=counts, meters=meters, recompute=objective.recompute)
            results.append(self._trained.update(rows, counts.tokens, self._temperature, loss, meters, entropy=True, entropy_gradient=through_entropy))
            # Only before the first update are the weights those that the engines sampled from.
            meters.comparing = False
        metrics = self._reduced(meters, int(batch.rewards.length_S.sum())) | batch.metrics(self.version) | more
        result = objective.steered(result_of(results, metrics))
        self.version += 1
        return result

    def step_sft(self, samples: Sequence[Sample]) -> StepResult:
        counts, weight_S = count(samples, self._max_new_tokens), weights_of(samples)
        weights = None
        if weight_S is not None:
            counts = replace(counts, weight=sum(w * int(s.loss_mask.sum()) for w, s in zip(weight_S.tolist(), samples, strict=True)))
            # They travel in the advantages' place.
            weights = [w.expand(s.response_length) for w, s in zip(weight_S, samples, strict=True)]
        rows = self._share(samples, range(len(samples)), weights)
        meters = Meters(self.device)
        update = self._trained.update(rows, counts.tokens, 1.0, partial(sft_loss, counts=counts), meters)
        result = result_of([update], self._reduced(meters, counts.tokens) | {"tokens/trained": float(counts.tokens)})
        self.version += 1
        return result

    def step_pairs(self, samples: Sequence[Sample]) -> StepResult:
        pairs = len(samples) // 2
        loss, rows, scored = self._begin_pairs(samples)
        meters = Meters(self.device)
        update = self._trained.update(rows, pairs, 1.0, loss, meters)
        tokens = count(samples, self._max_new_tokens).tokens
        more = scored | {"pairs/trained": float(pairs), "tokens/trained": float(tokens)}
        result = result_of([update], self._reduced(meters, pairs) | more)
        self.version += 1
        return result

    def evaluate_pairs(self, samples: Sequence[Sample]) -> dict[str, float]:
        pairs = len(samples) // 2
        loss, rows, _ = self._begin_pairs(samples)
        meters = Meters(self.device)
        for row, logprobs_N in self._logprobs_by_row(self._policy, rows, 1.0):
            out = loss(row, logprobs_N, None)
            meters.add("preference/loss", out.loss * pairs)
            for name, value in out.sums.items():
                meters.add(name, value)
        found = self._reduced(meters, pairs)
        return {f"eval/preference_{name}": found[f"preference/{name}"] for name in ("accuracy", "margin", "loss")}

    def divergence(self, samples: Sequence[Sample]) -> float:
        if self._distiller is None:
            raise ValueError("there is no teacher: it is loaded where the recipe has a [distill] section")
        rows = self._share(samples, range(len(samples)), None)
        self._distiller.prepare(rows)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        scored = self._logprobs_by_row(self._policy, rows, self._temperature)
        for row, logprobs_N in scored if self.mesh.speaks else []:
            total += self._distiller.compared(row, logprobs_N).divergence_N.double().sum()
        return float(summed(total, self.mesh.everyone)) / max(count(samples, self._max_new_tokens).tokens, 1)

    def logprobs(self, samples: Sequence[Sample], reference: bool = False) -> list[list[float]]:
        if reference and self._reference is None:
            raise ValueError("there is no reference model: it is loaded when algorithm.kl_coef > 0")
        scores_N = self._scores(samples, self._reference if reference and self._reference is not None else self._policy)
        return [part.tolist() for part in scores_N.split([s.response_length for s in samples])]

    def weight_specs(self) -> Sequence[TensorSpec]:
        return (self._apart or self._exporter).specs()

    def weight_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        return self._merged(names) if self._apart is None else self._apart.tensors(names)

    def weight_slices(self) -> Sequence[Slice]:
        return (self._apart or self._exporter).slices()

    def weight_slice(self, piece: Slice) -> Tensor:
        return (self._apart or self._exporter).slice(piece)

    def export(self, folder: Path) -> None:
        tensors = self._merged([spec.name for spec in self._exporter.specs()])
        if self.rank == 0:
            config = self._hf_config
            if self.architecture.values:
                shell = reward_shell(config, trust_remote_code=self._config.trust_remote_code)
                config = shell.config
                config.architectures = [type(shell).__name__]
            write_directory(Path(folder), tensors, self._config, config, self._dtype)
        for _ in tensors:  # the other ranks' part in gathering
            pass
        dist.barrier(self.mesh.everyone)

    def export_adapter(self, folder: Path) -> None:
        if self._adapters is None or self._lora is None:
            raise ValueError("there is no adapter: this trainer was built without a [lora] section")
        tensors = {name: tensor.to("cpu") for name, tensor in self._adapters.tensors([spec.name for spec in self._adapters.specs()])}
        if self.rank == 0:
            targets = sorted({name.split(".")[-3] for name in tensors})
            with whole(Path(folder)) as partial_folder:
                write_adapter(partial_folder, tensors, self._lora, targets, self._config.path)
        dist.barrier(self.mesh.everyone)

    @property
    def _apart(self) -> Exporter | None:
        """The adapters, where engines get them beside the weights that they have."""
        return self._adapters if self._lora is not None and self._lora.served == "apart" else None

    def _merged(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors of the model on rank 0, adapters in them, one at a time. Collective."""
        adapted = {} if self._adapters is None else {spec.name for spec in self._adapters.specs()}
        for name, tensor in self._exporter.tensors(names):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if self._adapters is None or self._lora is None or f"{stem}.lora_A.weight" not in adapted:
                yield name, tensor
                continue
            pair = [part for _, part in self._adapters.tensors([f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"])]
            parts = dict(zip(("lora_A", "lora_B"), pair, strict=True))
            yield name, merged(tensor, parts, self._lora.scaling) if self.rank == 0 else tensor

    def save(self, folder: Path, extra: dict[str, object], *, keep: int | None = None, asynchronous: bool = True) -> None:
        state: dict[str, object] = {"version": self.version}
        for one in self._saved():
            state |= {f"{one.prefix}optimizer_step": one.optimizer.steps, f"{one.prefix}applied_steps": one.optimizer.applied}
        if self._objective is not None:
            state |= self._objective.state()
        self._writer.wait()
        self._writer.save(Path(folder), checkpoint.collect(self._saved()), state, extra, keep=keep, asynchronous=asynchronous)

    def wait_saved(self) -> None:
        self._writer.wait()

    def load(self, folder: Path) -> dict[str, object]:
        self._writer.wait()
        state, extra = checkpoint.load(Path(folder), self._saved(), self.mesh, seed=self._seed)
        self.version = int(state["version"])
        for one in self._saved():
            one.optimizer.steps, one.optimizer.applied = int(state[f"{one.prefix}optimizer_step"]), int(state[f"{one.prefix}applied_steps"])
        if self._objective is not None:
            self._objective.restore(state)
        return extra

    def sleep(self) -> None:
        """On CPU everything stays; on a GPU parameters, gradients and optimizer state give their memory back."""
        if self.device.type != "cpu":
            for one in self._saved():
                one.optimizer.sleep()
            self._move_reference(torch.device("cpu"))
            torch.cuda.empty_cache()

    def wake(self) -> None:
        if self.device.type != "cpu":
            for one in self._saved():
                one.optimizer.wake()
            self._move_reference(self.device)

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and end the writer."""
        self._writer.close()

    def _begin_pairs(self, samples: Sequence[Sample]) -> tuple[RowLoss, list[Row], dict[str, float]]:
        """The loss, ready for this rank's rows of `samples`, and what there is to report beforehand: KTO's KL. Collective."""
        if self._pairs is None:
            raise ValueError("this trainer was built without an objective on pairs: it cannot do step_pairs")
        rows, scored, kl = self._share(samples, range(len(samples)), None, together=2), dict[str, float](), None
        if isinstance(self._pairs, RewardModelConfig):
            return partial(loss_of_rewards, config=self._pairs, total=len(samples) // 2), rows, scored
        if self._reference is not None:
            for row, scores_N in self._logprobs_by_row(self._reference, rows, 1.0):
                row.reference_logprobs_N = scores_N
            if self._pairs.objective == "kto":
                kl = self._moved_away(mismatched(samples), self._reference)
                scored["preference/kl"] = float(kl)
        return partial(loss_of_answers, config=self._pairs, total=len(samples) // 2, kl=kl), rows, scored

    def _moved_away(self, strangers: Sequence[Sample], reference: Model) -> Tensor:
        rows = self._share(strangers, range(len(strangers)), None)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        found = (self._policy.score(rows, 1.0), reference.score(rows, 1.0))
        for row, *scores in zip(rows, *found, strict=True) if self.mesh.speaks else []:
            total += moved_away(row, *scores)
        log_ratios, answers = summed(total, self.mesh.everyone)
        return log_ratios / answers

    def _build_critic(self, critic: CriticConfig, builder: Builder, total_steps: int) -> Trained:
        """It computes in the policy's dtype."""
        path = critic.path or self._config.path
        hf_config = load_config(path, trust_remote_code=self._config.trust_remote_code)
        architecture = architecture_of(hf_config, values=True)
        architecture.check(self.mesh.layout)
        return replace(builder, path=path, hf_config=hf_config, architecture=architecture).trained(critic, total_steps)

    def _step_critic(self, critic: Trained, batch: Batch, updates: Sequence[list[Row]], rewards: Rewards, found: TokenAdvantages) -> dict[str, float]:
        config = self._critic_config
        assert config is not None

        def take(rows: Sequence[Row], total: int, meters: Meters) -> Update:
            return critic.update(rows, total, 1.0, partial(loss_of_values, total=total, clip=config.value_clip), meters, name="value/loss")

        shares = [self._micros(batch.samples, places) for places in batch.updates]
        return learn_values(batch, shares, updates, rewards, found, Meters(self.device), take, self._reduced)

    def _saved(self) -> list[checkpoint.Saved]:
        described, adapters = None, self._trained.adapters
        if adapters is not None and self._lora is not None:
            architecture = adapters_of(self.architecture, self._lora)
            described = [shards_of(architecture, self.mesh, own, chunk) for chunk, own in enumerate(adapters)]
        models = [checkpoint.Saved("", self._trained.chunks, self._trained.optimizer, described)]
        return models if self._critic is None else [*models, checkpoint.Saved("critic.", self._critic.chunks, self._critic.optimizer)]

    def _move_reference(self, device: torch.device) -> None:
        for chunk in [] if self._reference is None or self._lora is not None else self._reference.chunks:
            chunk.to(device)

    def _scores(self, samples: Sequence[Sample], model: Model) -> Tensor:
        """What `model` says of each response token of all `samples` end to end, float64 [N] on the CPU, equal on every rank. Collective."""
        flat_N = torch.zeros(sum(s.response_length for s in samples), dtype=torch.float64, device=self.device)
        own = flat_N.split([s.response_length for s in samples])
        micros = self._micros(samples, range(len(samples)))
        scored = self._logprobs_by_row(model, [row_of(micro, None, self.device) for micro in micros], self._temperature)
        if self.mesh.speaks:
            for micro, (_, scores_N) in zip(micros, scored, strict=True):
                for index, part in micro.by_sample(scores_N):
                    own[index].copy_(part)
        return summed(flat_N, self.mesh.everyone).cpu()

    def _logprobs_by_row(self, model: Model, rows: list[Row], temperature: float) -> list[tuple[Row, Tensor]]:
        """Each row with its log-probs; nothing on stages before the last. Collective."""
        found = model.score(rows, temperature)
        return list(zip(rows, found, strict=True)) if self.mesh.scores else []

    def _micros(self, samples: Sequence[Sample], places: Sequence[int], together: int = 1) -> list[MicroBatch]:
        layout, capacity = self.mesh.layout, self._trainer.max_tokens_per_microbatch
        micros = share(samples, places, rank=self.mesh.place.data, world=layout.data, max_tokens=capacity, together=together)
        # Interleaved stages take rows in groups of as many as there are stages.
        missing = -len(micros) % layout.pipeline if layout.chunks > 1 else 0
        return micros + [MicroBatch(packed=pack([DUMMY]), indices=(), taught=(nothing(samples[places[0]].taught),))] * missing

    def _share(self, samples: Sequence[Sample], places: Sequence[int], advantages: Sequence[Tensor] | None, together: int = 1) -> list[Row]:
        """This data-parallel rank's rows; the ranks that share a model have the same."""
        return [row_of(micro, advantages, self.device) for micro in self._micros(samples, places, together)]

    def _reduced(self, meters: Meters, total: int) -> dict[str, float]:
        """Only the last stage has anything to report: it tells the others of its pipeline."""
        metrics = [meters.reduced(total, self.mesh.layout.data, self.mesh.data) if self.mesh.scores else {}]
        if self.mesh.layout.pipeline > 1:
            dist.broadcast_object_list(metrics, src=dist.get_process_group_ranks(self.mesh.pipeline)[-1], group=self.mesh.pipeline)
        return metrics[0]
