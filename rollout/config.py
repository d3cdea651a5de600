"""The `[rollout]`, `[reward]` and `[evaluate]` sections."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from miles.config import LONGEST_S, Section
from miles.data.config import PromptDataConfig


class SamplingConfig(Section):
    """How tokens are chosen."""

    temperature: float = Field(1.0, ge=0, description="the trainer scores at the same temperature; 0 is greedy")
    top_k: int = Field(0, ge=0, description="0 keeps every token")
    top_p: float = Field(1.0, gt=0, le=1, description="1 keeps every token")
    max_new_tokens: int = Field(256, ge=1, description="longest response")
    stop: list[str] = Field(default_factory=list, description="extra stop tokens by text, each one token; the model's end-of-turn token always stops")


class RolloutConfig(SamplingConfig):
    """Engines, and how many prompts and samples a step takes."""

    engine: Literal["torch", "sglang"] = Field("torch", description="torch: in the rollout actor, for laptops and exact runs; sglang: the real server")
    engines: int = Field(1, ge=1, description="number of engines, one rollout actor each")
    prompts_per_step: int = Field(8, ge=1, description="prompts of one training step")
    samples_per_prompt: int = Field(8, ge=1, description="group size G")
    extra_prompts: int = Field(
        0,
        ge=0,
        description="prompts begun beyond prompts_per_step at run.max_staleness = 0: the first to finish are trained, the rest aborted and tried again",
    )
    max_attempts: int = Field(3, ge=1, description="how often a group is tried before its prompt is given up")
    timeout_s: float = Field(
        600.0,
        gt=0,
        le=LONGEST_S,
        description="deadline of one group, generation and rewards, in seconds from its turn at an engine: it waits while others fill max_running",
    )
    max_running: int = Field(256, ge=1, description="sequences decoded at once by one engine")
    threads: int = Field(1, ge=1, description="CPU threads of each engine")
    gpus_per_engine: float = Field(0, ge=0, description="GPUs of each engine; 0 runs on CPU")
    sglang_args: dict[str, Any] = Field(default_factory=dict, description="more arguments of the SGLang server, as in its ServerArgs")


class TeacherEngineConfig(Section):
    """Engines of a teacher's own, for `distill.place = "engine"`."""

    engine: Literal["torch", "sglang"] = Field("torch", description="torch: a model in the teacher's actor, on CPU; sglang: the real server")
    engines: int = Field(1, ge=1, description="number of engines, one actor each")
    threads: int = Field(1, ge=1, description="CPU threads of each engine")
    gpus_per_engine: float = Field(0, ge=0, description="GPUs of each engine; 0 runs on CPU")
    timeout_s: float = Field(600.0, gt=0, le=LONGEST_S, description="deadline of one call, in seconds; an engine that misses it is started again")
    sglang_args: dict[str, Any] = Field(default_factory=dict, description="more arguments of the SGLang server, as in its ServerArgs")

    @model_validator(mode="after")
    def _on_cpu(self) -> TeacherEngineConfig:
        if self.engine == "torch" and self.gpus_per_engine:
            raise ValueError(f"teacher_engine.gpus_per_engine = {self.gpus_per_engine:g} with engine = 'torch', which runs on CPU: use 'sglang'")
        return self


class RewardItem(Section):
    """One reward function."""

    name: str = Field(description="exact_match, math, length, format, judge, reward_model, or a function of yours as module:function")
    weight: float = Field(1.0, description="the total reward is the weighted sum")
    args: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")


class RewardConfig(Section):
    """What is rewarded."""

    functions: list[RewardItem] = Field(default_factory=lambda: [RewardItem(name="exact_match")], description="reward functions, summed by weight")
    steps: str = Field("", description="regular expression that ends a step of an answer, for functions that reward each (they take `steps`); empty: none do")
    timeout_s: float = Field(10.0, gt=0, le=LONGEST_S, description="deadline of one call; after it the reward is None and is counted")
    workers: int = Field(1, ge=1, description="processes for graders that need one (math)")
    max_failures: int = Field(64, ge=1, description="failures in a row after which the run ends with the last traceback")

    @field_validator("steps")
    @classmethod
    def _steps_compile(cls, value: str) -> str:
        import regex  # what cuts answers; it takes more than the standard library's `re`, and a deadline

        try:
            regex.compile(value)
        except regex.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from error
        return value


class OptionalRewardConfig(RewardConfig):
    """What is rewarded, where training can do without."""

    functions: list[RewardItem] = Field(default_factory=list, description="reward functions, summed by weight; none: nothing is rewarded")


class EvaluateConfig(SamplingConfig):
    """Evaluation on its own data."""

    data: PromptDataConfig = Field(default_factory=PromptDataConfig)
    every: int = Field(0, ge=0, description="steps between evaluations; 0: never during the run")
    at_start: bool = Field(True, description="also before the first step (where every > 0)")
    engines: int = Field(
        0, ge=0, description="engines of its own, which evaluate while training goes on; 0: those that roll out, and training waits until they are done"
    )
    samples_per_prompt: int = Field(1, ge=1, description="samples n for pass@k")
    k: list[int] = Field(default_factory=lambda: [1], description="the k of pass@k: powers of two up to 256, each at most samples_per_prompt")
    greedy: bool = Field(False, description="also one greedy answer per prompt")
    pass_threshold: float = Field(1.0, description="a sample with at least this reward counts as correct")

    @model_validator(mode="after")
    def _k_fits(self) -> EvaluateConfig:
        if not self.k or not set(self.k) <= {2**i for i in range(9)}:
            raise ValueError(f"evaluate.k = {self.k}: name at least one k, each of them 1, 2, 4, ... 256, for example [1, 4]")
        too_large = [k for k in self.k if k > self.samples_per_prompt]
        if too_large:
            raise ValueError(f"evaluate.k has {too_large[0]}, but samples_per_prompt is {self.samples_per_prompt}: pass@k needs at least k samples")
        return self
