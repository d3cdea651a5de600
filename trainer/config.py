"""The `[trainer]` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from miles.config import LONGEST_S, Section

_LOGITS = 2**26


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay, and the learning-rate schedule."""

    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False, description="AdamW's betas")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of matrices; norms and biases have none")
    clip_norm: float = Field(1.0, gt=0, allow_inf_nan=True, description="global gradient norm is clipped to this; inf: never")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up from 0")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="where linear and cosine end, as a share of lr")

    @field_validator("betas")
    @classmethod
    def _decay(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("both must be at least 0 and below 1, for example [0.9, 0.95]")
        return betas


class CriticConfig(OptimizerConfig):
    """`[critic]`: a model of the expected reward beside the policy, on the same ranks, for `algorithm.advantages = "gae"` (PPO)."""

    path: str | None = Field(
        None, description="where its weights begin: a model directory with the policy's tokenizer, or a reward model of `miles reward`; null: model.path"
    )
    lr: float = Field(1e-5, gt=0, description="peak learning rate")
    value_clip: float = Field(0.2, gt=0, allow_inf_nan=True, description="how far a value may move in one step before it stops learning; inf: never")
    head_start: int = Field(0, ge=0, description="training steps at the start of the run in which the critic learns and the policy stays as it is")


class TrainerConfig(OptimizerConfig):
    """The trainer backend and its shape."""

    backend: Literal["fsdp", "megatron"] = Field(
        "fsdp", description="fsdp: FSDP2 on any transformers causal language model; megatron: Megatron-Core, for models whose layers must be divided"
    )
    ranks: int = Field(1, ge=1, description="ranks, one process each: data- x tensor-parallel, with megatron also x pipeline-parallel")
    replicas: int = Field(
        1, ge=1, description="fsdp: copies of the model, each sharded over ranks / replicas of them (HSDP), for nodes with slow links between them"
    )
    tensor_parallel: int = Field(1, ge=1, description="ranks that share the heads and columns of each layer")
    pipeline_parallel: int = Field(1, ge=1, description="megatron: stages of layers, one behind the other")
    pipeline_chunks: int = Field(1, ge=1, description="megatron: pieces of the model on each stage; more than one interleaves them for shorter idle times")
    expert_parallel: int = Field(1, ge=1, description="ranks that share the experts of a layer: tokens travel to them; fsdp: 1, or all ranks")
    timeout_s: float = Field(
        600, gt=0, le=LONGEST_S, description="seconds that a rank waits for the others in a collective; one that hangs is then named and the run ends"
    )
    threads: int = Field(1, ge=1, description="CPU threads of each rank")
    gpus_per_rank: float = Field(0, ge=0, description="GPUs of each rank; 0 trains on CPU with gloo")
    max_tokens_per_microbatch: int = Field(8192, ge=1, description="tokens packed into one forward; a longer sequence goes alone")
    optimizer_steps_per_batch: int = Field(1, ge=1, description="a step's batch is split into this many optimizer steps")
    activations: Literal["keep", "recompute", "hilore"] = Field(
        "keep",
        description="what layers hold for the backward. keep: everything; recompute: their inputs, which takes less memory and more time; "
        "hilore: the fastest choice by layer and micro-batch within activation_memory and activation_risk",
    )
    activation_memory: float = Field(
        1.5, ge=1, description="hilore: the most bytes that a micro-batch holds, as a multiple of what recompute would hold of the update's largest one"
    )
    activation_risk: float = Field(
        0.01, ge=0, description="hilore: error of an optimizer step's gradient that 8-bit activations may cause, relative to its norm; 0: exact, none is used"
    )
    compile: bool = Field(
        False, description="fsdp: torch.compile of each decoder layer around its attention, which makes the first steps longer by a minute or more"
    )
    offload: bool = Field(
        False, description="fsdp: weights, gradients and AdamW stay in CPU memory and are updated there; a GPU has what is gathered, layer by layer"
    )
    frozen: list[str] = Field([], description='fsdp: parameters that stay as they are, by name, * for anything: ["model.embed_tokens.*", "model.layers.0.*"]')
    prompt_sharing: bool = Field(
        False, description="what sequences begin with in common is computed once, attention and memory included; false: once in each row, attention excepted"
    )
    balance_coef: float = Field(
        0.0, ge=0, description="fsdp, mixture of experts: weight of the loss that keeps the loads of the experts even in each sequence; 0: none"
    )
    logprob_chunk: int | None = Field(None, ge=1, description="tokens whose logits exist at once; null: as many as have 2^26 logits, 256 MiB in float32")

    @model_validator(mode="after")
    def _parallel(self) -> TrainerConfig:
        for option in ("pipeline_parallel", "pipeline_chunks"):
            if self.backend == "fsdp" and getattr(self, option) > 1:
                raise ValueError(f"trainer.{option} = {getattr(self, option)} needs trainer.backend = 'megatron': fsdp shards parameters over all its ranks")
        if self.activations == "hilore" and (self.backend == "megatron" or self.prompt_sharing):
            other = "trainer.backend = 'megatron'" if self.backend == "megatron" else "trainer.prompt_sharing"
            raise ValueError(f"trainer.activations = 'hilore' is not there for {other}: use 'recompute', or leave that out")
        if self.backend == "fsdp" and self.ranks % (self.replicas * self.tensor_parallel):
            raise ValueError(
                f"trainer.ranks = {self.ranks} does not divide by trainer.replicas x trainer.tensor_parallel = {self.replicas} x {self.tensor_parallel}"
            )
        for wanted, what in (
            (self.backend == "megatron", "trainer.backend = 'megatron'"),
            (self.prompt_sharing, "trainer.prompt_sharing"),
            (self.activations == "hilore", "trainer.activations = 'hilore'"),
            (self.tensor_parallel > 1, f"trainer.tensor_parallel = {self.tensor_parallel}"),
            (self.expert_parallel > 1, f"trainer.expert_parallel = {self.expert_parallel}"),
        ):
            if self.compile and wanted:
                raise ValueError(f"trainer.compile does not go with {what}: leave one of them out")
        experts = self.backend == "fsdp" and self.expert_parallel > 1
        if experts and self.expert_parallel != self.ranks:
            raise ValueError(f"trainer.expert_parallel = {self.expert_parallel} of trainer.ranks = {self.ranks}: fsdp divides experts over all ranks or none")
        for wanted, what in (
            (self.replicas > 1, f"trainer.replicas = {self.replicas}"),
            (self.tensor_parallel > 1, f"trainer.tensor_parallel = {self.tensor_parallel}"),
            (self.offload, "trainer.offload"),
            (self.prompt_sharing, "trainer.prompt_sharing"),
            (self.activations == "hilore", "trainer.activations = 'hilore'"),
        ):
            if experts and wanted:
                raise ValueError(f"trainer.expert_parallel = {self.expert_parallel} does not go with {what}: leave one of them out")
        divided = self.backend == "fsdp" and self.tensor_parallel > 1
        for wanted, what in ((self.prompt_sharing, "trainer.prompt_sharing"), (self.activations == "hilore", "trainer.activations = 'hilore'")):
            if divided and wanted:
                raise ValueError(f"trainer.tensor_parallel = {self.tensor_parallel} does not go with {what}: leave one of them out")
        if self.backend == "megatron" and self.balance_coef:
            raise ValueError(f"trainer.balance_coef = {self.balance_coef:g} is for trainer.backend = 'fsdp': set it to 0")
        if self.backend == "megatron" and self.offload:
            raise ValueError("trainer.offload = true is for trainer.backend = 'fsdp': leave it out")
        if self.backend == "megatron" and self.frozen:
            raise ValueError(f"trainer.frozen = {self.frozen} is for trainer.backend = 'fsdp': leave it out")
        if self.backend == "megatron" and self.replicas > 1:
            raise ValueError(f"trainer.replicas = {self.replicas} is for trainer.backend = 'fsdp': megatron's data-parallel ranks are replicas already")
        if self.backend == "megatron" and self.prompt_sharing:
            raise ValueError("trainer.prompt_sharing is not there for trainer.backend = 'megatron': leave it out, or use 'fsdp'")
        return self

    def chunk(self, vocabulary: int) -> int:
        """`logprob_chunk`, or what it is for this vocabulary. Example: 67 million logits are 447 tokens of a vocabulary of 150,000."""
        return self.logprob_chunk or max(1, _LOGITS // vocabulary)
