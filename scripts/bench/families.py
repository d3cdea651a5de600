"""Every objective learns: each family improves its own measure on the quickstart's task, over several seeds, in one table.

    python scripts/bench/families.py                              every family, seeds 0 1 2
    python scripts/bench/families.py --only grpo dpo --seeds 0    some of them
    python scripts/bench/families.py --steps 0 --write docs/families.md     no training: the table of the runs that are finished in FOLDER
    python scripts/bench/families.py --forwards --steps 300                 GRPO to the end by each way of computing the trainer's forward

For each seed a fresh model is fine-tuned on the task and every family goes on from it for a short run of its recipe under `scripts/recipes/`,
with the overrides that stand beside its name below. The measure is the family's own: pass@1 of sampled answers to held-out words for what
rewards teach, the divergence from the teacher on them for distillation, the objective itself on held-out pairs for preferences, the share
of these that are ranked right for a reward model, the loss on batches not seen before for SFT. The runs are short, so the table shows that
each learns, not which is best. With rewards, a batch is split into 4 optimizer steps, so that ratios leave 1 and clips, gates and masks
have something to do; where engines lag, they are up to 2 batches ahead.

What is finished stays in FOLDER: an interrupted call goes on where it stopped. Exit code 1 when a family did not improve for some seed.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() not in (Path(__file__).resolve().parent, ROOT))]

from miles.core.environment import set_defaults  # noqa: E402

set_defaults()  # before anything imports torch

import ray  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from miles.config import Resolved, Section, load  # noqa: E402
from miles.core.model.tiny import make_tiny_model  # noqa: E402
from miles.data.toy import ALPHABET, write_reverse_task  # noqa: E402
from miles.run import prefer, reward, rl, sft  # noqa: E402
from miles.run.cluster import connect  # noqa: E402
from miles.run.recipe import ClusterConfig, DistillRecipe, PreferenceRecipe, RewardModelRecipe, RLRecipe, SFTRecipe  # noqa: E402
from miles.tracking.jsonl import read_metrics  # noqa: E402

RECIPES = ROOT / "scripts" / "recipes"


@dataclass(frozen=True)
class Command:
    """A `miles` command: its recipe type, what runs it, the measure it is judged by, and whether more of that is better."""

    schema: type[Section]
    run: Callable[[Resolved], object]
    measure: str
    more_is_better: bool = True


SFT = Command(SFTRecipe, sft.run, "loss/nll", more_is_better=False)
RL = Command(RLRecipe, rl.run, "eval/pass_at_1")
DISTILL = Command(DistillRecipe, rl.run, "eval/distill_kl", more_is_better=False)
PREFER = Command(PreferenceRecipe, prefer.run, "eval/preference_loss", more_is_better=False)
REWARD = Command(RewardModelRecipe, reward.run, "eval/preference_accuracy")


@dataclass(frozen=True)
class Family:
    """One row of the table. `source` names the recipe; `overrides` are key=value, where {seed_folder} is the seed's."""

    name: str
    command: Command
    source: str
    overrides: tuple[str, ...] = ()


def grpo(name: str, *overrides: str) -> Family:
    split = ("trainer.optimizer_steps_per_batch=4", "trainer.lr=3e-4")
    return Family(name, RL, "quickstart_rl", (*split, *(f"algorithm.{o}" for o in overrides)))


def lagging(name: str, *overrides: str) -> Family:
    """`grpo` with engines up to two batches ahead of the trainer."""
    family = grpo(name, *overrides)
    return Family(family.name, RL, family.source, (*family.overrides, "run.max_staleness=2"))


def distill(name: str, *overrides: str) -> Family:
    return Family(name, DISTILL, "quickstart_distill", overrides)


def preference(objective: str, *overrides: str) -> Family:
    return Family(objective, PREFER, "quickstart_prefer", (f"preference.objective={objective}", *overrides))


FAMILIES = [
    Family("sft", SFT, "quickstart_sft"),
    # advantages
    grpo("grpo"),
    grpo("grpo, mean-absolute scale", "scale=mean_abs"),
    grpo("Dr.GRPO", "scale=none", "aggregation=sequence_sum_constant"),
    grpo("DAPO", "dynamic_sampling=true", "aggregation=token_mean"),
    grpo("rloo", "advantages=rloo"),
    grpo("reinforce_pp", "advantages=reinforce_pp"),
    grpo("reinforce_pp_baseline", "advantages=reinforce_pp_baseline"),
    grpo("gdpo", "advantages=gdpo"),
    Family("gdpo, two rewards", RL, "quickstart_gdpo", ("trainer.optimizer_steps_per_batch=4", "trainer.lr=3e-4")),
    Family("ppo", RL, "ppo"),
    Family("gigpo", RL, "quickstart_gigpo", ("trainer.optimizer_steps_per_batch=4", "trainer.lr=3e-4")),
    Family("turn_grpo", RL, "quickstart_turn_grpo", ("trainer.optimizer_steps_per_batch=4", "trainer.lr=3e-4")),
    # policy losses
    grpo("dual clip", "clip_dual=3.0"),
    grpo("gspo", "loss=gspo", "clip_low=3e-4", "clip_high=4e-4"),
    grpo("gspo_token", "loss=gspo_token", "clip_low=3e-4", "clip_high=4e-4"),
    grpo("cispo", "loss=cispo"),
    grpo("reinforce", "loss=reinforce"),
    grpo("importance", "loss=importance"),
    grpo("sapo", "loss=sapo"),
    grpo("dppo_tv", "loss=dppo_tv"),
    grpo("dppo_kl", "loss=dppo_kl"),
    grpo("clip_cov guard", "entropy_guard=clip_cov"),
    grpo("kl_cov guard", "entropy_guard=kl_cov"),
    # engines that lag
    lagging("truncated importance sampling, engines ahead", "old_logprobs=recompute", "correction=truncate"),
    lagging("IcePop, engines ahead", "old_logprobs=recompute", "correction=mask"),
    lagging("decoupled PPO, engines ahead", "old_logprobs=recompute", "correction=importance"),
    lagging("sequence-level truncation, engines ahead", "old_logprobs=recompute", "correction=truncate", "correction_level=sequence"),
    grpo("off-policy sequence masking", "sequence_mask=0.1"),
    # KL to the reference: whichever estimate is reported, the loss has the gradient of the KL itself
    grpo("KL k3 in the loss", "kl_coef=0.005", "kl_estimator=k3"),
    grpo("KL in the reward, steered", "kl_coef=0.005", "kl_in=reward", "kl_target=0.05"),
    # distillation from the seed's GRPO model
    distill("distill, sampled", "distill.divergence=sampled"),
    distill("distill, forward", "distill.divergence=forward"),
    distill("distill, reverse", "distill.divergence=reverse"),
    distill("distill, Jensen-Shannon", "distill.divergence=jensen"),
    distill("distill, another tokenizer", "distill.divergence=sampled"),
    # preference and reward models
    preference("dpo"),
    preference("ipo"),
    preference("kto"),
    preference("orpo"),
    preference("simpo"),
    Family("reward model", REWARD, "quickstart_reward"),
]

FORWARDS = [
    Family("rows", RL, "quickstart_rl"),
    Family("prompts shared", RL, "quickstart_rl", ("trainer.prompt_sharing=true",)),
    Family("hilore", RL, "quickstart_rl", ("trainer.activations=hilore", "trainer.activation_memory=1.5")),
    Family("prefixes while engines decode", RL, "quickstart_rl", ("run.prefix_overlap=true",)),
]
"""The split forward's parts and what they replace: the same task, steps and seeds, so the measure should differ by a seed's noise alone."""


@dataclass(frozen=True)
class Result:
    """A family's measure before its first and after its last step."""

    family: str
    seed: int
    before: float
    after: float


def main() -> int:
    options = parse()
    families = [f for f in (FORWARDS if options.forwards else FAMILIES) if not options.only or f.name in options.only]
    runs = [(family, seed) for seed in options.seeds for family in families]
    unfinished = [(family, seed) for family, seed in runs if result(family, seed, options) is None]
    if options.steps and unfinished:
        connect(ClusterConfig())
        try:
            for family, seed in unfinished:
                learn(family, seed, options)
        finally:
            ray.shutdown()
    found = [r for family, seed in runs if (r := result(family, seed, options)) is not None]
    if options.write:
        options.write.write_text(page(families, found, options), encoding="utf-8")
    return show(families, found)


def place(family: Family, seed: int, folder: Path) -> Path:
    """The family's run folder."""
    return folder / f"seed-{seed}" / family.name.replace(" ", "_").replace(",", "")


def result(family: Family, seed: int, options: argparse.Namespace) -> Result | None:
    """What the run in its folder came to; None where there is none that is finished."""
    metrics = place(family, seed, options.folder) / "metrics.jsonl"
    if not metrics.exists():
        return None
    steps, values = read_metrics(metrics).get(family.command.measure, ([], []))
    if len(values) < 2 or (family.command is not SFT and options.steps and steps[-1] != options.steps):
        return None
    return Result(family.name, seed, values[0], values[-1])


def learn(family: Family, seed: int, options: argparse.Namespace) -> None:
    start = prepare(options.folder / f"seed-{seed}", seed)
    if family.command is SFT:
        return
    where = free(place(family, seed, options.folder))
    print(f"\n== {family.name}, seed {seed}", flush=True)
    common: dict[str, object] = {"run.folder": where, "run.seed": seed, "run.steps": options.steps, "model.path": start / "sft" / "model"}
    common |= data_of(family, start, options.steps)
    command = family.command
    command.run(load(command.schema, RECIPES / f"{family.source}.toml", [*(f"{k}={v}" for k, v in common.items()), *family.overrides]))


def data_of(family: Family, start: Path, steps: int) -> dict[str, object]:
    """Where the family's data lies, and its evaluation before the first and after the last step."""
    if family.command in (PREFER, REWARD):
        pairs = start / "data" / "pairs.jsonl"
        return {
            "data.paths": f'["{pairs}@[:7936]"]',
            "evaluate.data.paths": f'["{pairs}@[7936:]"]',
            "evaluate.every": steps,
        }
    more: dict[str, object] = {
        "data.paths": f'["{start / "data" / "train.jsonl"}"]',
        "evaluate.data.paths": f'["{start / "data" / "test.jsonl"}"]',
        "evaluate.every": steps,
        "evaluate.greedy": "false",
    }
    if family.command is DISTILL:
        more["distill.teacher"] = other_teacher(start) if family.name == "distill, another tokenizer" else start / "grpo" / "model"
    return more


def prepare(start: Path, seed: int) -> Path:
    """The seed's model, data and fine-tuned model, made once."""
    if not (start / "sft" / "model" / "config.json").exists():
        make_tiny_model(start / "model", alphabet=ALPHABET, layers=4, context=64, seed=seed)
        write_reverse_task(start / "data", seed)
        fine_tune(start, "model", "sft", f"run.seed={seed}")
    return start


def other_teacher(start: Path) -> Path:
    """A teacher whose tokenizer writes two letters in one token, fine-tuned on the seed's conversations until it knows the task better than the student."""
    model = start / "other" / "model"
    if not (model / "config.json").exists():
        make_tiny_model(start / "other_model", alphabet=ALPHABET, layers=4, context=64, pairs=True)
        fine_tune(start, "other_model", "other", "run.steps=600")
    return model


def fine_tune(start: Path, model: str, name: str, *overrides: str) -> None:
    places = [f"run.folder={free(start / name)}", f"model.path={start / model}", f'data.paths=["{start / "data" / "sft.jsonl"}"]']
    sft.run(load(SFTRecipe, RECIPES / "quickstart_sft.toml", [*places, *overrides]))


def free(folder: Path) -> Path:
    """`folder`; what an interrupted call left there is put aside."""
    if folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.interrupted-{number}")).exists():
            number += 1
        folder.rename(aside)
    return folder


def improved(family: Family, found: Result) -> bool:
    return found.after != found.before and (found.after > found.before) == family.command.more_is_better


def row(family: Family, results: Sequence[Result]) -> list[str]:
    """Its cells in the table: means over seeds, and the seeds that improved."""
    own = [r for r in results if r.family == family.name]
    if not own:
        return [family.name, family.command.measure, "", "", "", "not run"]
    before, after = [r.before for r in own], [r.after for r in own]
    spread = f"{min(after):.3f} to {max(after):.3f}"
    better = sum(improved(family, r) for r in own)
    return [family.name, family.command.measure, f"{statistics.mean(before):.3f}", f"{statistics.mean(after):.3f}", spread, f"{better} of {len(own)}"]


COLUMNS = ("family", "measure", "before", "after", "range after", "seeds improved")


def show(families: Sequence[Family], results: Sequence[Result]) -> int:
    table = Table(title="each family's own measure")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    for family in families:
        table.add_row(*row(family, results))
    Console(width=140).print(table)
    by_name = {family.name: family for family in families}
    return 0 if results and all(improved(by_name[r.family], r) for r in results) else 1


def page(families: Sequence[Family], results: Sequence[Result], options: argparse.Namespace) -> str:
    """The table in Markdown."""
    cells = [list(COLUMNS), ["---"] * 2 + ["---:"] * 4, *(row(family, results) for family in families)]
    lines = "\n".join(f"| {' | '.join(line)} |" for line in cells)
    seeds = sorted({r.seed for r in results})
    return (
        "# Each family of objectives learns\n\n"
        f"Written by `scripts/bench/families.py`, whose head says what is measured and how, on {datetime.date.today()}: means over seeds "
        f"{', '.join(map(str, seeds))}, as far as each has been run, on a model of 0.25M parameters. Less is better of a loss and of a divergence, more of "
        f"the others. The runs are short: the table shows that each learns, not which is best.\n\n{lines}\n"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only", nargs="*", choices=[f.name for f in FAMILIES + FORWARDS], metavar="FAMILY", help="default: all; distillation needs grpo's run"
    )
    parser.add_argument("--forwards", action="store_true", help="ways of computing the forward instead of objectives")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=50, help="training steps of each run; 0: train nothing")
    parser.add_argument("--folder", type=Path, default=Path("runs/families"))
    parser.add_argument("--write", type=Path, help="a Markdown file for the table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
