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
from algorithms.distillation.config import DistillConfig
from algorithms.preference.config import PairConfig, PreferenceConfig, RewardModelConfig
from miles.core.checkpoint import rng
from miles.core.model.config import LoraConfig, ModelConfig
from miles.core.model.load import load_config
from miles.data.packing import pack
from miles.data.types import Group, Sample
from trainer.config import CriticConfig, TrainerConfig
from trainer.contracts import StepResult
from trainer.megatron import cpu
from trainer.megatron.architecture import architecture_of
from trainer.megatron.directory import Source, write_directory
from trainer.megatron.layout import layout_of
from trainer.megatron.mesh import open_mesh, summed
from trainer.megatron.names import parts, shapes
from trainer.objective import Objective, result_of, sft_loss
from trainer.rows.batch import Batch, count, weights_of
from trainer.rows.meters import Meters
from trainer.rows.pairs import loss_of_answers, mismatched, moved_away
from trainer.rows.row import Row, RowLoss, row_of
from trainer.rows.schedule import Update
from trainer.rows.share import DUMMY, MicroBatch, share
from weight_sync.contracts import TensorSpec
from weight_sync.slices import Slice

cpu.redirect()  # before anything below imports Megatron-Core

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402

from trainer.megatron import checkpoint  # noqa: E402
from trainer.megatron.export import Exporter  # noqa: E402
from trainer.megatron.model import Chunk, Config, build_chunks, transformer_config  # noqa: E402
from trainer.megatron.optimizer import Optimizer  # noqa: E402
from trainer.megatron.policy import Model  # noqa: E402


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
            ("[distill]", distill),
            ("[critic]", critic),
            ("[lora]", lora),
            ("a reward model", pairs if isinstance(pairs, RewardModelConfig) else None),
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
        self.architecture = architecture_of(self._hf_config)
        layout = layout_of(trainer)
        self.architecture.check(layout)
        assert layout.ranks == world, (layout, world)
        self.mesh = open_mesh(layout, rank, trainer.timeout_s)
        rng.seed_all(seed, rank)
        self._dtype = torch.bfloat16 if model.dtype == "bfloat16" else master_dtype
        self._parts = parts(self.architecture, layout, rank)
        self._source = Source(model.path, shapes(self.architecture))

        config = self._transformer(master_dtype, recompute=trainer.activations == "recompute")
        chunks, masters = self._load(config, master_dtype)
        self._chunks = [self._wrapped(config, chunk, number) for number, chunk in enumerate(chunks)]
        self._ddp_options(config)
        self._policy = Model(self._chunks, self.mesh, self.architecture.vocabulary, trainer.chunk(self.architecture.vocabulary))
        self._optimizer = Optimizer(self._chunks, trainer, total_steps, self.mesh, masters)
        self._objective = None if algorithm is None else Objective(algorithm, max_new_tokens)
        self._pairs = pairs if isinstance(pairs, PreferenceConfig) else None
        self._reference: Model | None = None
        if (algorithm is not None and algorithm.kl_coef > 0) or (self._pairs is not None and self._pairs.needs_reference):
            frozen = self._load(self._transformer(master_dtype, recompute=False), master_dtype)[0]
            self._reference = Model(
                [c.requires_grad_(False) for c in frozen], self.mesh, self.architecture.vocabulary, trainer.chunk(self.architecture.vocabulary)
            )
        own = [chunk.module.tensors() for chunk in self._chunks]
        self._exporter = Exporter(self.architecture, self.mesh, own, self._dtype)
        self._writer = checkpoint.Writer(rank, world)
        self.version = 0

    def step_rl(self, groups: Sequence[Group]) -> StepResult:
        """See `TrainerBackend`. Scores at a step's start are needed for later updates only: the first one's own are those."""
        objective = self._objective
        if objective is None:
            raise ValueError("this trainer was built without an [algorithm] section: it can do step_sft only")
        batch = Batch(groups, self._trainer.optimizer_steps_per_batch)
        rewards, penalty = batch.rewards, dict[str, float]()
        if objective.reference_in_reward:
            rewards, penalty = objective.penalised(batch, self._scores(batch.samples, reference=True))
        advantages = objective.advantages(batch, rewards).advantages_N.split(batch.lengths)
        updates = [self._share(batch.samples, places, advantages) for places in batch.updates]
        for number, rows in enumerate(updates):
            if self._reference is not None and objective.reference_in_loss:
                for row, scores_N in self._logprobs_by_row(self._reference, rows, self._temperature):
                    row.reference_logprobs_N = scores_N
            if number > 0 and objective.recompute:
                for row, scores_N in self._logprobs_by_row(self._policy, rows, self._temperature):
                    row.start_logprobs_N = scores_N
        meters = Meters(self.device)
        results = []
        for places, rows in zip(batch.updates, updates, strict=True):
            counts = objective.counts([batch.samples[i] for i in places], [advantages[i] for i in places])
            loss, through_entropy = partial(objective.loss, counts=counts, meters=meters), objective.config.entropy_coef != 0
            results.append(self._update(rows, counts.tokens, self._temperature, loss, meters, entropy=True, entropy_gradient=through_entropy))
            # Only before the first update are the weights those that the engines sampled from.
            meters.comparing = False
        metrics = self._reduced(meters, int(batch.rewards.length_S.sum())) | batch.metrics(self.version) | penalty
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
        update = self._update(rows, counts.tokens, 1.0, partial(sft_loss, counts=counts), meters)
        result = result_of([update], self._reduced(meters, counts.tokens) | {"tokens/trained": float(counts.tokens)})
        self.version += 1
        return result

    def step_pairs(self, samples: Sequence[Sample]) -> StepResult:
        pairs = len(samples) // 2
        loss, rows, scored = self._begin_pairs(samples)
        meters = Meters(self.device)
        update = self._update(rows, pairs, 1.0, loss, meters)
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
        raise ValueError("trainer.backend = 'megatron' has no teacher: use trainer.backend = 'fsdp'")

    def logprobs(self, samples: Sequence[Sample], reference: bool = False) -> list[list[float]]:
        if reference and self._reference is None:
            raise ValueError("there is no reference model: it is loaded when algorithm.kl_coef > 0")
        scores_N = self._scores(samples, reference)
        return [part.tolist() for part in scores_N.split([s.response_length for s in samples])]

    def weight_specs(self) -> Sequence[TensorSpec]:
        return self._exporter.specs()

    def weight_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        return self._exporter.tensors(names)

    def weight_slices(self) -> Sequence[Slice]:
        return self._exporter.slices()

    def weight_slice(self, piece: Slice) -> Tensor:
        return self._exporter.slice(piece)

    def export(self, folder: Path) -> None:
        tensors = self._exporter.tensors([spec.name for spec in self._exporter.specs()])
        if self.rank == 0:
            write_directory(Path(folder), tensors, self._config, self._hf_config, self._dtype)
        for _ in tensors:  # the other ranks' part in gathering
            pass
        dist.barrier(self.mesh.everyone)

    def export_adapter(self, folder: Path) -> None:
        raise ValueError("[lora] is not there for trainer.backend = 'megatron': use trainer.backend = 'fsdp'")

    def save(self, folder: Path, extra: dict[str, object], *, keep: int | None = None, asynchronous: bool = True) -> None:
        state: dict[str, object] = {"optimizer_step": self._optimizer.steps, "applied_steps": self._optimizer.applied, "version": self.version}
        if self._objective is not None:
            state |= self._objective.state()
        self._writer.wait()
        self._writer.save(Path(folder), checkpoint.collect(self._chunks, self._optimizer), state, extra, keep=keep, asynchronous=asynchronous)

    def wait_saved(self) -> None:
        self._writer.wait()

    def load(self, folder: Path) -> dict[str, object]:
        self._writer.wait()
        state, extra = checkpoint.load(Path(folder), self._chunks, self._optimizer, self.mesh, seed=self._seed)
        self._optimizer.steps, self._optimizer.applied, self.version = (int(state[key]) for key in ("optimizer_step", "applied_steps", "version"))
        if self._objective is not None:
            self._objective.restore(state)
        return extra

    def sleep(self) -> None:
        """On CPU everything stays; on a GPU parameters, gradients and optimizer state give their memory back."""
        if self.device.type != "cpu":
            self._optimizer.sleep()
            self._move_reference(torch.device("cpu"))
            torch.cuda.empty_cache()

    def wake(self) -> None:
        if self.device.type != "cpu":
            self._optimizer.wake()
            self._move_reference(self.device)

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and end the writer."""
        self._writer.close()

    def _begin_pairs(self, samples: Sequence[Sample]) -> tuple[RowLoss, list[Row], dict[str, float]]:
        """The loss, ready for this rank's rows of `samples`, and what there is to report beforehand: KTO's KL. Collective."""
        if self._pairs is None:
            raise ValueError("this trainer was built without an objective on pairs: it cannot do step_pairs")
        rows, scored, kl = self._share(samples, range(len(samples)), None, together=2), dict[str, float](), None
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

    def _transformer(self, master_dtype: torch.dtype, *, recompute: bool) -> Config:
        return transformer_config(self.architecture, self.mesh, dtype=master_dtype, compute_dtype=self._dtype, recompute=recompute)

    def _load(self, config: Config, master_dtype: torch.dtype) -> tuple[list[Chunk], list[dict[str, Tensor]]]:
        """Chunks in the dtype of compute; where that is narrower than the masters', also these."""
        chunks = build_chunks(config, self.architecture, self._hf_config, self.mesh, self.device)
        masters = []
        for chunk, wanted in zip(chunks, self._parts, strict=True):
            values = {name: self._source.read(part, master_dtype) for name, part in wanted.items()}
            with torch.no_grad():
                for name, parameter in chunk.named_parameters():
                    parameter.copy_(values[name])
            if self._dtype != master_dtype:
                chunk.to(self._dtype)
                masters.append(values)
            for name, tensor in chunk.tensors().items():
                if wanted[name].buffer:
                    tensor.data = values[name].to(tensor.device, torch.float32)
        return chunks, masters

    def _move_reference(self, device: torch.device) -> None:
        for chunk in [] if self._reference is None else self._reference.chunks:
            chunk.to(device)

    def _wrapped(self, config: Config, chunk: Chunk, number: int) -> DistributedDataParallel:
        options = DistributedDataParallelConfig(grad_reduce_in_fp32=self._dtype == torch.bfloat16, use_distributed_optimizer=True)
        return DistributedDataParallel(config, options, chunk, disable_bucketing=number > 0)

    def _ddp_options(self, config: Config) -> None:
        # Losses are shares of a global mean: what Megatron-Core counted must not divide them again.
        config.finalize_model_grads_func = lambda chunks, _, **options: finalize_model_grads(chunks, None, **options)

    def _scores(self, samples: Sequence[Sample], reference: bool = False) -> Tensor:
        """Log-probs of each response token of all `samples` end to end, float64 [N] on the CPU, equal on every rank. Collective."""
        model = self._reference if reference else self._policy
        assert model is not None
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
        return micros + [MicroBatch(packed=pack([DUMMY]), indices=())] * missing

    def _share(self, samples: Sequence[Sample], places: Sequence[int], advantages: Sequence[Tensor] | None, together: int = 1) -> list[Row]:
        """This data-parallel rank's rows; the ranks that share a model have the same."""
        return [row_of(micro, advantages, self.device) for micro in self._micros(samples, places, together)]

    def _update(
        self, rows: list[Row], total: int, temperature: float, loss: RowLoss, meters: Meters, *, entropy: bool = False, entropy_gradient: bool = False
    ) -> Update:
        """One optimizer step: losses of the rows are shares of a mean over `total` tokens, so their gradients simply add up."""
        if total == 0:
            return self._optimizer.skip()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._policy.train(rows, temperature, loss, meters, total, entropy=entropy, entropy_gradient=entropy_gradient)
        return self._optimizer.step()

    def _reduced(self, meters: Meters, total: int) -> dict[str, float]:
        """Only the last stage has anything to report: it tells the others of its pipeline."""
        metrics = [meters.reduced(total, self.mesh.layout.data, self.mesh.data) if self.mesh.scores else {}]
        if self.mesh.layout.pipeline > 1:
            dist.broadcast_object_list(metrics, src=dist.get_process_group_ranks(self.mesh.pipeline)[-1], group=self.mesh.pipeline)
        return metrics[0]
