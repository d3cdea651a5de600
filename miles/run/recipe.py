"""The configuration trees of all commands: each package's own section, composed."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, ValidationError, model_validator

from algorithms.config import GROUP_RELATIVE, TURN_CREDIT, AlgorithmConfig
from algorithms.distillation.config import DistillConfig
from algorithms.preference.config import PreferenceConfig, RewardModelConfig
from miles.config import Section
from miles.core.checkpoint.config import CheckpointConfig
from miles.core.model.config import LoraConfig, ModelConfig
from miles.data.config import PairDataConfig, PromptDataConfig, SFTDataConfig
from miles.tracking.config import TrackingConfig
from rollout.config import EvaluateConfig, OptionalRewardConfig, RewardConfig, RolloutConfig, TeacherEngineConfig
from trainer.config import CriticConfig, OptimizerConfig, TrainerConfig
from weight_sync.config import WeightSyncConfig


class RunConfig(Section):
    """The run as a whole."""

    folder: str = Field("runs/run", description="run folder; it must be new or empty unless --resume is given")
    seed: int = Field(0, ge=0, description="seed of everything: data order, sampling, initialisation")
    steps: int = Field(100, ge=1, description="training steps; each takes one batch")
    max_staleness: int = Field(
        0,
        ge=0,
        description="weight versions between a group's oldest token and the update that trains on it: 0 synchronous, 1 one-step-off, more: engines "
        "work ahead by as many batches, and what grew older is generated again",
    )
    prefix_overlap: bool = Field(
        False, description="the trainer computes a batch's prompts while the engines still answer them (Rollplex); implies trainer.prompt_sharing"
    )


class ClusterConfig(Section):
    """The Ray cluster."""

    address: str | None = Field(
        None, description="address of a running Ray cluster (host:port, or auto); null takes RAY_ADDRESS, as Ray does; without that, or local: one starts here"
    )
    cpus: int | None = Field(
        None, ge=1, description="CPUs that a cluster started here shares out, one per thread of each actor; null: the machine's cores, at least 2"
    )
    object_store_mb: int = Field(256, ge=80, description="Ray's shared memory when a cluster is started here, in MiB")


class TenantConfig(Section):
    """`[tenants.NAME]`: what one of several tenants has of its own. An option that is not given here is as in the recipe's section of that name."""

    data: PromptDataConfig = PromptDataConfig()
    reward: RewardConfig = RewardConfig()
    lora: LoraConfig = LoraConfig()
    trainer: OptimizerConfig = OptimizerConfig()
    evaluate: EvaluateConfig = EvaluateConfig()


class RLRecipe(Section):
    """`miles rl`: GRPO-family training of a policy on prompts with rewards."""

    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig
    lora: LoraConfig | None = None
    data: PromptDataConfig = PromptDataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig | None = None
    trainer: TrainerConfig = TrainerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    tenants: dict[str, TenantConfig] = Field(
        {},
        description="[tenants.NAME]: several adapters trained and served at once on one base model, each a run of its own in run.folder/NAME; "
        "data, reward, lora, trainer (the optimizer's options) and evaluate may differ",
    )

    def of_tenants(self) -> dict[str, RLRecipe]:
        """Each tenant's recipe, which is the one that it would have alone."""
        shared = self.model_dump(exclude_unset=True, exclude={"tenants"})
        found = {}
        for name, tenant in self.tenants.items():
            tree = _over(shared, tenant.model_dump(exclude_unset=True))
            tree["run"] = tree.get("run", {}) | {"folder": f"{self.run.folder}/{name}"}
            found[name] = type(self).model_validate(tree)
        return found

    @property
    def distillation(self) -> DistillConfig | None:
        """What is learned from a teacher: nothing, but in a `DistillRecipe`."""
        return None

    @property
    def teacher_engines(self) -> TeacherEngineConfig | None:
        """The teacher's own engines: none, but in a `DistillRecipe` with place = "engine"."""
        return None

    @property
    def trainer_section(self) -> TrainerConfig:
        """`[trainer]` with what other sections imply for it."""
        return self.trainer.model_copy(update={"prompt_sharing": True}) if self.run.prefix_overlap else self.trainer

    @property
    def rewards_teach(self) -> bool:
        """Whether anything is learned from rewards."""
        return self.distillation is None or self.distillation.policy_weight > 0

    @property
    def served_lora(self) -> LoraConfig | None:
        """The adapters that engines hold beside their weights, if they do."""
        return self.lora if self.lora is not None and self.lora.served == "apart" else None

    @model_validator(mode="after")
    def _arithmetic(self) -> RLRecipe:
        prompts, group, updates = self.rollout.prompts_per_step, self.rollout.samples_per_prompt, self.trainer.optimizer_steps_per_batch
        if prompts % updates:
            raise ValueError(
                f"rollout.prompts_per_step = {prompts} does not divide into trainer.optimizer_steps_per_batch = {updates}: "
                f"{prompts} / {updates} = {prompts / updates:.2f} prompts per optimizer step; groups are never split"
            )
        if group == 1 and self.algorithm.advantages in GROUP_RELATIVE and self.rewards_teach:
            raise ValueError(
                f"rollout.samples_per_prompt = 1 with algorithm.advantages = {self.algorithm.advantages!r}: a group of one has no baseline and learns "
                "nothing; use at least 2, or algorithm.advantages = 'reinforce_pp' or 'gae'"
            )
        if self.algorithm.advantages in TURN_CREDIT and not self.reward.steps:
            raise ValueError(
                f"algorithm.advantages = {self.algorithm.advantages!r} gives credit by turns, but an answer here is one turn: say in reward.steps what ends "
                "a step of it and name a reward function that takes `steps`, or use 'grpo'"
            )
        if self.critic is None and self.algorithm.advantages == "gae":
            raise ValueError("algorithm.advantages = 'gae' needs a critic's values: add a [critic] section (an empty one takes the policy's model)")
        if self.critic is not None and self.algorithm.advantages != "gae" and ":" not in self.algorithm.advantages:
            raise ValueError(f"[critic] with algorithm.advantages = {self.algorithm.advantages!r}, which reads no values: use 'gae', or leave [critic] out")
        if self.critic is not None and not self.rewards_teach:
            raise ValueError("[critic] learns the rewards' returns, which teach nothing here: leave it out, or set distill.policy_weight above 0")
        if self.critic is not None and self.critic.head_start >= self.run.steps:
            raise ValueError(f"critic.head_start = {self.critic.head_start} of run.steps = {self.run.steps} steps: the policy would never move; lower it")
        if group == 1 and self.algorithm.dynamic_sampling:
            raise ValueError("rollout.samples_per_prompt = 1 with algorithm.dynamic_sampling: all rewards of a group of one are equal, so each is dropped")
        if self.rollout.engine == "torch" and self.rollout.gpus_per_engine:
            raise ValueError(f"rollout.gpus_per_engine = {self.rollout.gpus_per_engine:g} with rollout.engine = 'torch', which runs on CPU: use 'sglang'")
        if self.evaluate.engines and (not self.evaluate.every or self.distillation is not None):
            why = "with a teacher, to whom the trainer compares each answer" if self.evaluate.every else "without evaluate.every: they have nothing to do"
            raise ValueError(f"evaluate.engines = {self.evaluate.engines} {why}; set it to 0")
        extra = self.rollout.extra_prompts
        if extra and (self.run.max_staleness or self.run.prefix_overlap):
            other = f"run.max_staleness = {self.run.max_staleness}" if self.run.max_staleness else "run.prefix_overlap"
            raise ValueError(
                f"rollout.extra_prompts = {extra} does not go with {other}: it is for a trainer that waits for the slowest group, prompts and all; set it to 0"
            )
        if extra and self.rollout.max_attempts == 1:
            raise ValueError(
                f"rollout.extra_prompts = {extra} aborts groups to try them again, and rollout.max_attempts = 1 gives each up at once: use at least 2"
            )
        if self.rollout.temperature == 0:
            raise ValueError("rollout.temperature = 0 samples greedily: every sample of a group would be the same; use a temperature above 0")
        if self.model.true_on_policy and self.model.dtype != "float32":
            raise ValueError(f"model.true_on_policy needs model.dtype = 'float32', not {self.model.dtype!r}")
        if self.lora is not None and self.model.true_on_policy and self.lora.dora:
            raise ValueError("model.true_on_policy with lora.dora = true, whose layers have no batch-invariant version: leave one of them out")
        divided = self.trainer.backend == "fsdp" and (self.trainer.replicas > 1 or self.trainer.tensor_parallel > 1)
        if self.weight_sync.transport == "p2p" and divided:
            raise ValueError(
                "weight_sync.transport = 'p2p' sends the rows that fsdp's ranks have, with trainer.replicas = 1 and trainer.tensor_parallel = 1 alone: "
                "use 'tensor' or 'broadcast'"
            )
        if self.served_lora is not None and self.rollout.engine == "sglang":
            _served_by_sglang(self.served_lora, self.model)
        if self.lora is not None and self.lora.served == "merged":
            for wanted, what in ((self.weight_sync.transport == "p2p", "weight_sync.transport = 'p2p'"), (self.model.true_on_policy, "model.true_on_policy")):
                if wanted:
                    raise ValueError(f"lora.served = 'merged' does not go with {what}: use 'apart'")
        return self

    @model_validator(mode="after")
    def _many_adapters_on_one_base(self) -> RLRecipe:
        if not self.tenants:
            return self
        for wrong, why in (
            (self.lora is None, "a model that is trained whole: add a [lora] section"),
            (self.lora is not None and self.lora.served != "apart", "lora.served = 'merged', which writes over the base: use 'apart'"),
            (self.distillation is not None, "a teacher: use `miles rl`"),
            (self.critic is not None, "[critic], which is trained whole: use other advantages than 'gae'"),
            (self.rollout.engine != "torch", f"rollout.engine = {self.rollout.engine!r}: use 'torch'"),
            (self.trainer.backend != "fsdp", f"trainer.backend = {self.trainer.backend!r}: use 'fsdp'"),
            (self.trainer.offload, "trainer.offload: leave it out"),
            (self.weight_sync.transport != "tensor", f"weight_sync.transport = {self.weight_sync.transport!r}: use 'tensor'"),
            (self.run.prefix_overlap, "run.prefix_overlap, which takes the trainer while another tenant may need it: leave it out"),
            (self.evaluate.engines, f"evaluate.engines = {self.evaluate.engines}: set it to 0"),
            (self.tracking.wandb != "disabled", f"tracking.wandb = {self.tracking.wandb!r}, which has one run a process: use 'disabled'"),
        ):
            if wrong:
                raise ValueError(f"[tenants] does not go with {why}")
        for name in self.tenants:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                raise ValueError(f"tenants has {name!r}, which names a folder too: use letters, digits, '-' and '_'")
        for name, tenant in self.tenants.items():
            if "served" in tenant.lora.model_fields_set or "engines" in tenant.evaluate.model_fields_set:
                raise ValueError(f"tenants.{name}: lora.served and evaluate.engines are the same for all tenants: leave them out here")
        try:
            self.of_tenants()
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"[tenants]: {'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}") from error
        return self

    @model_validator(mode="after")
    def _prompts_and_answers_at_one_version(self) -> RLRecipe:
        if not self.run.prefix_overlap:
            return self
        for wrong, why in (
            (self.run.max_staleness, f"run.max_staleness = {self.run.max_staleness}: prompts and answers must be of one weight version; use 0"),
            (
                self.trainer.optimizer_steps_per_batch > 1,
                f"trainer.optimizer_steps_per_batch = {self.trainer.optimizer_steps_per_batch}: later updates have other weights than the prompts were "
                "computed with; use 1",
            ),
            (self.trainer.backend == "megatron", "trainer.backend = 'megatron', which does not share prompts: use 'fsdp'"),
            (
                self.trainer.activations not in ("keep", "recompute"),
                f"trainer.activations = {self.trainer.activations!r}, which weighs tokens by their answers: use 'keep' or 'recompute'",
            ),
            (self.distillation is not None, "a teacher, which sees whole sequences: leave it out"),
            (self.critic is not None and self.critic.head_start, "critic.head_start, in which the policy stays as it is: set it to 0"),
        ):
            if wrong:
                raise ValueError(f"run.prefix_overlap does not go with {why}")
        return self

    @model_validator(mode="after")
    def _weights_in_one_place(self) -> RLRecipe:
        if self.weight_sync.transport != "views":
            return self
        for wrong, why in (
            (self.rollout.engine != "torch", f"rollout.engine = {self.rollout.engine!r}, whose server has weights of its own: use 'torch'"),
            (self.trainer.backend != "fsdp", f"trainer.backend = {self.trainer.backend!r}: use 'fsdp'"),
            (self.trainer.gpus_per_rank, f"trainer.gpus_per_rank = {self.trainer.gpus_per_rank:g}: torch engines are on the CPU; use 'broadcast'"),
            (self.trainer.offload, "trainer.offload: leave it out"),
            (self.model.dtype != "float32", f"model.dtype = {self.model.dtype!r}: the trainer's own weights are float32; use 'float32', or 'tensor'"),
            (self.lora is not None, "[lora], whose adapters are all that moves: use 'tensor'"),
            (self.run.max_staleness, f"run.max_staleness = {self.run.max_staleness}: engines would answer while their weights change; use 0, or 'tensor'"),
            (self.evaluate.engines, f"evaluate.engines = {self.evaluate.engines}, which answer while the trainer goes on: set it to 0, or use 'tensor'"),
        ):
            if wrong:
                raise ValueError(f"weight_sync.transport = 'views' does not go with {why}")
        return self


class DistillRecipe(RLRecipe):
    """`miles distill`: on-policy distillation. The student answers prompts as in `miles rl`, and a teacher says how it should have."""

    distill: DistillConfig
    teacher_engine: TeacherEngineConfig = TeacherEngineConfig()
    reward: OptionalRewardConfig = OptionalRewardConfig()

    @property
    def distillation(self) -> DistillConfig:
        return self.distill

    @property
    def teacher_engines(self) -> TeacherEngineConfig | None:
        return self.teacher_engine if self.distill.place == "engine" else None

    @model_validator(mode="after")
    def _beside_a_teacher(self) -> DistillRecipe:
        if self.trainer.prompt_sharing:
            raise ValueError("trainer.prompt_sharing does not go with a teacher, which sees whole sequences: leave it out")
        _rows_of_log_probs(self.trainer, "a teacher")
        if self.distill.place != "engine" and "teacher_engine" in self.model_fields_set:
            raise ValueError(f"[teacher_engine] with distill.place = {self.distill.place!r}, which starts no engine: set place = 'engine', or leave it out")
        served = self.distill.place == "address" or (self.distill.place == "engine" and self.teacher_engine.engine == "sglang")
        if served and self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature = {self.rollout.temperature:g} with a teacher served by SGLang, which tells log-probs of given tokens at "
                "temperature 1 alone: use temperature = 1, teacher_engine.engine = 'torch', or distill.place = 'trainer'"
            )
        if self.algorithm.entropy_guard != "none":
            raise ValueError(
                f"algorithm.entropy_guard = {self.algorithm.entropy_guard!r} ranks tokens by the rewards' advantages, which a teacher changes: leave it out"
            )
        if self.algorithm.kl_coef and self.algorithm.kl_in == "reward" and not self.rewards_teach:
            raise ValueError("algorithm.kl_in = 'reward' takes the KL off the rewards, which teach nothing here: use kl_in = 'loss'")
        if self.rewards_teach and not self.reward.functions:
            raise ValueError(
                f"distill.policy_weight = {self.distill.policy_weight:g} without a reward: name one in reward.functions, or leave policy_weight at 0"
            )
        if self.algorithm.dynamic_sampling and not self.rewards_teach:
            raise ValueError(
                "algorithm.dynamic_sampling drops groups by their rewards, which teach nothing here: leave it out, or set distill.policy_weight above 0"
            )
        return self


class SupervisedRecipe(Section):
    """What all recipes have in common that learn from a data set that is there beforehand."""

    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig
    batch_size: int = Field(32, ge=1, description="conversations, or pairs of them, of one optimizer step")
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()


class SFTRecipe(SupervisedRecipe):
    """`miles sft`: supervised fine-tuning on conversations."""

    lora: LoraConfig | None = None
    data: SFTDataConfig = SFTDataConfig()


class PairEvaluateConfig(Section):
    """Evaluation on pairs that are not trained on."""

    data: PairDataConfig = PairDataConfig()
    every: int = Field(0, ge=0, description="steps between evaluations; 0: never during the run")
    at_start: bool = Field(True, description="also before the first step (where every > 0)")


class PreferenceRecipe(SupervisedRecipe):
    """`miles prefer`: a policy learns from pairs of answers which is better."""

    lora: LoraConfig | None = None
    data: PairDataConfig = PairDataConfig()
    evaluate: PairEvaluateConfig = PairEvaluateConfig()
    preference: PreferenceConfig = PreferenceConfig()

    @model_validator(mode="after")
    def _strangers(self) -> PreferenceRecipe:
        if self.preference.objective == "kto" and self.batch_size == 1:
            raise ValueError("batch_size = 1 with preference.objective = 'kto', which compares prompts with answers to other prompts: use at least 2")
        _rows_of_log_probs(self.trainer, "pairs")
        return self


class RewardModelRecipe(SupervisedRecipe):
    """`miles reward`: a reward model learns from pairs of answers which is better."""

    data: PairDataConfig = PairDataConfig()
    evaluate: PairEvaluateConfig = PairEvaluateConfig()
    reward_model: RewardModelConfig = RewardModelConfig()

    @model_validator(mode="after")
    def _whole_sequences(self) -> RewardModelRecipe:
        if self.trainer.prompt_sharing:
            raise ValueError("trainer.prompt_sharing shares log-probs' work, and a reward model computes none: leave it out")
        _rows_of_log_probs(self.trainer, "pairs")
        return self


def _over(tree: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`tree` with the leaves of `own` in place of its own."""
    both = {name: _over(tree[name], value) if isinstance(value, dict) and isinstance(tree.get(name), dict) else value for name, value in own.items()}
    return tree | both


def _served_by_sglang(lora: LoraConfig, model: ModelConfig) -> None:
    """SGLang lays some layers of a model end to end, and passes over an adapter that has but the wrong part of such a one."""
    for wanted, what in ((lora.dora, "lora.dora = true"), (model.true_on_policy, "model.true_on_policy")):
        if wanted:
            raise ValueError(f"{what} does not go with [lora] and rollout.engine = 'sglang': use rollout.engine = 'torch', or leave it out")
    for needed, of in ((("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj")), (("gate_proj",), ("gate_proj", "up_proj"))):
        missing = [name for name in needed if name not in lora.targets]
        if missing and set(of) & set(lora.targets):
            raise ValueError(f"lora.targets = {lora.targets} lacks {' and '.join(missing)}, which rollout.engine = 'sglang' needs beside {', '.join(of)}")


def _rows_of_log_probs(trainer: TrainerConfig, teacher: str) -> None:
    if trainer.balance_coef:
        raise ValueError(f"trainer.balance_coef = {trainer.balance_coef:g} stands beside a loss of rewards or SFT, and here {teacher} teaches: set it to 0")
    if trainer.activations == "hilore":
        raise ValueError(f"trainer.activations = 'hilore' weighs tokens by a loss on log-probs, and here {teacher} teaches: use 'recompute'")


def lora_of(recipe: Section) -> LoraConfig | None:
    """The recipe's `[lora]`; None where it has none, or its kind knows none."""
    return getattr(recipe, "lora", None)


class EvaluateRecipe(Section):
    """`miles evaluate`: pass@k of a model on prompts with rewards."""

    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    model: ModelConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _engines_that_roll_out(self) -> EvaluateRecipe:
        if self.evaluate.engines:
            raise ValueError(f"evaluate.engines = {self.evaluate.engines} is for evaluation while a run trains: set rollout.engines here")
        return self
