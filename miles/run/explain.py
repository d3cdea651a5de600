"""`miles config`: every resolved value with its origin, and the arithmetic of a step. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from miles.config import ConfigError, Section, load, read_recipe
from miles.run import preflight
from miles.run.demands import rl_demands, sum_text, total, trainer_demands
from miles.run.recipe import DistillRecipe, EvaluateRecipe, PreferenceRecipe, RewardModelRecipe, RLRecipe, SFTRecipe, SupervisedRecipe, lora_of
from miles.tracking.redact import redact

KINDS: dict[str, type[Section]] = {
    "rl": RLRecipe, "distill": DistillRecipe, "sft": SFTRecipe, "prefer": PreferenceRecipe, "reward": RewardModelRecipe, "evaluate": EvaluateRecipe,
}  # fmt: skip
_SFT_ONLY = {"messages_column", "completion_column", "train_on", "max_tokens"}


def explain(path: str, overrides: Sequence[str], kind: str | None = None) -> str:
    """The text of `miles config`.

    Raises:
        ConfigError: the recipe is wrong, or its sections do not tell what it is for and `kind` is None.
    """
    kind = kind or infer_kind(path, overrides)
    resolved = load(KINDS[kind], path, overrides)
    rows = [(key, str(redact(value, key.rpartition(".")[2])), origin) for key, value, origin in resolved.leaves()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"# a recipe for `miles {kind}`"]
    lines += [f"{key:<{widths[0]}}  {value:<{min(widths[1], 40)}}  {origin}" for key, value, origin in rows]
    return "\n".join([*lines, "", *arithmetic(resolved.config)])


def infer_kind(path: str, overrides: Sequence[str] = ()) -> str:
    """What a recipe is for, from the sections it has (overrides count)."""
    sections, data_keys = _sections(path, overrides)
    if "preference" in sections:
        return "prefer"
    if "reward_model" in sections:
        return "reward"
    if "batch_size" in sections or data_keys & _SFT_ONLY:
        return "sft"
    if "distill" in sections:
        return "distill"
    if sections & {"algorithm", "weight_sync"} or (sections & {"rollout", "reward"} and sections & {"data", "trainer"}):
        return "rl"
    if "evaluate" in sections and not sections & {"data", "trainer"}:
        return "evaluate"
    raise ConfigError(f"{path}: sections {', '.join(sorted(sections))} do not tell what it is for; pass --kind rl, --kind sft or --kind evaluate")


def arithmetic(recipe: Section) -> Iterator[str]:
    """The numbers of one step as equations, one a line."""
    if isinstance(recipe, RLRecipe):
        yield from _rl_arithmetic(recipe)
    elif isinstance(recipe, SupervisedRecipe):
        yield from _supervised_arithmetic(recipe)
    elif isinstance(recipe, EvaluateRecipe):
        n = recipe.evaluate.samples_per_prompt
        yield f"evaluation: {n} sampled{' + 1 greedy' if recipe.evaluate.greedy else ''} answers a prompt, k = {recipe.evaluate.k}"


def _rl_arithmetic(recipe: RLRecipe) -> Iterator[str]:
    prompts, group, updates = recipe.rollout.prompts_per_step, recipe.rollout.samples_per_prompt, recipe.trainer.optimizer_steps_per_batch
    sequences = prompts * group
    yield (
        f"one step: {prompts} prompts x {group} samples = {sequences} sequences = "
        f"{updates} optimizer step{'s' * (updates > 1)} x {sequences // updates} sequences ({prompts // updates} whole groups)"
    )
    yield f"the run: {recipe.run.steps} steps x {sequences} sequences = {recipe.run.steps * sequences} sequences, {recipe.run.steps * updates} optimizer steps"
    yield from _trainer_arithmetic(recipe, f"response at most {recipe.rollout.max_new_tokens} tokens")
    if recipe.run.prefix_overlap:
        room = recipe.trainer.max_tokens_per_microbatch // 2
        yield f"overlap: while the engines answer, each rank computes up to {room} tokens of their prompts, half of trainer.max_tokens_per_microbatch"
    if recipe.critic is not None:
        yield f"critic: as many optimizer steps of its own; in the first {recipe.critic.head_start} of {recipe.run.steps} steps it learns alone"
    demands = rl_demands(recipe)
    yield f"CPUs: {sum_text(demands)} = {total(demands, 'CPU'):g}"
    ahead = {0: "synchronous", 1: "one step off"}.get(recipe.run.max_staleness, f"up to {recipe.run.max_staleness} batches ahead")
    yield f"staleness: at most {recipe.run.max_staleness} weight versions ({ahead})"


def _supervised_arithmetic(recipe: SupervisedRecipe) -> Iterator[str]:
    what = "conversations" if isinstance(recipe, SFTRecipe) else "pairs of conversations"
    yield f"one step: {recipe.batch_size} {what} = 1 optimizer step x {recipe.batch_size}"
    yield f"the run: {recipe.run.steps} steps x {recipe.batch_size} = {recipe.run.steps * recipe.batch_size} {what}"
    longest = recipe.data.max_tokens if isinstance(recipe, (SFTRecipe, PreferenceRecipe, RewardModelRecipe)) else None
    yield from _trainer_arithmetic(recipe, f"sequence at most {f'{longest} tokens' if longest else 'the context of the model'}")
    demands = trainer_demands(recipe.trainer)
    yield f"CPUs: {sum_text(demands)} = {total(demands, 'CPU'):g}"


def _trainer_arithmetic(recipe: RLRecipe | SupervisedRecipe, longest: str) -> Iterator[str]:
    ranks, limit = recipe.trainer.ranks, recipe.trainer.max_tokens_per_microbatch
    if recipe.trainer.backend == "megatron":
        yield from preflight.megatron_plan(recipe.model, recipe.trainer, lora_of(recipe))
    else:
        yield from preflight.fsdp_plan(recipe.model, recipe.trainer, lora_of(recipe))
    ranks //= recipe.trainer.tensor_parallel * recipe.trainer.pipeline_parallel
    yield (
        f"micro-batches: each of {ranks} data-parallel rank{'s' * (ranks > 1)} packs its share of an optimizer step into rows of at most {limit} tokens "
        f"({longest}); the loss is divided by global counts, so this split changes memory and speed, not the gradient"
    )


def _sections(path: str, overrides: Sequence[str]) -> tuple[set[str], set[str]]:
    _, tree = read_recipe(Path(path))
    keys = [override.partition("=")[0].strip() for override in overrides]
    data = tree.get("data", {})
    data_keys = set(data) if isinstance(data, dict) else set()
    return set(tree) | {key.partition(".")[0] for key in keys}, data_keys | {key.removeprefix("data.") for key in keys if key.startswith("data.")}
