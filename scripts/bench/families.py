"""Every objective learns: each family improves its own measure on the quickstart's task, over several seeds, in one table.

    python scripts/bench/families.py                              every family, seeds 0 1 2
    python scripts/bench/families.py --only grpo dpo --seeds 0    some of them

For each seed a fresh model is fine-tuned on the task (90 steps) and every family goes on from it for a short run of its recipe under
`scripts/recipes/`, with the overrides that stand beside its name below. The measure is the family's own, on held-out data: pass@1 of
sampled answers for what rewards teach, the divergence from the teacher for distillation, the share of pairs ranked right for
preference and reward models. The runs are short, so the table shows that each learns, not which is best. With rewards, a batch is split
into 4 optimizer steps, so that ratios leave 1 and clips, gates, masks and corrections have something to do.

Results are kept in `FOLDER/results.jsonl` one by one: an interrupted call goes on where it stopped. Exit code 1 when a family did not
improve for some seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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


RL = Command(RLRecipe, rl.run, "eval/pass_at_1")
DISTILL = Command(DistillRecipe, rl.run, "eval/distill_kl", more_is_better=False)
PREFER = Command(PreferenceRecipe, prefer.run, "eval/preference_accuracy")
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


def distill(name: str, *overrides: str) -> Family:
    return Family(name, DISTILL, "quickstart_distill", overrides)


def preference(objective: str, *overrides: str) -> Family:
    return Family(objective, PREFER, "quickstart_prefer", (f"preference.objective={objective}", *overrides))


FAMILIES = [
    # advantages
    grpo("grpo"),
    grpo("grpo, mean-absolute scale", "scale=mean_abs"),
    grpo("Dr.GRPO", "scale=none", "aggregation=sequence_sum_constant"),
    grpo("DAPO", "dynamic_sampling=true", "aggregation=token_mean"),
    grpo("rloo", "advantages=rloo"),
    grpo("reinforce_pp", "advantages=reinforce_pp"),
    grpo("reinforce_pp_baseline", "advantages=reinforce_pp_baseline"),
    grpo("gdpo", "advantages=gdpo"),
    Family("ppo", RL, "ppo"),
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
    # engines that differ or lag
    grpo("truncated importance sampling", "old_logprobs=recompute", "correction=truncate"),
    grpo("IcePop", "old_logprobs=recompute", "correction=mask"),
    grpo("decoupled PPO", "old_logprobs=recompute", "correction=importance"),
    grpo("off-policy sequence masking", "sequence_mask=0.1"),
    # KL to the reference
    grpo("KL k1 in the loss", "kl_coef=0.005", "kl_estimator=k1"),
    grpo("KL k2 in the loss", "kl_coef=0.005", "kl_estimator=k2"),
    grpo("KL k3 in the loss", "kl_coef=0.005", "kl_estimator=k3"),
    grpo("KL in the reward, steered", "kl_coef=0.005", "kl_in=reward", "kl_target=0.05"),
    # distillation from the seed's GRPO model
    distill("distill, sampled", "distill.divergence=sampled"),
    distill("distill, forward", "distill.divergence=forward"),
    distill("distill, reverse", "distill.divergence=reverse"),
    distill("distill, Jensen-Shannon", "distill.divergence=jensen"),
    # preference and reward models
    preference("dpo"),
    preference("ipo"),
    preference("kto"),
    preference("orpo"),
    preference("simpo"),
    Family("reward model", REWARD, "quickstart_reward"),
]


@dataclass(frozen=True)
class Result:
    """A family's measure on held-out data before its first and after its last step."""

    family: str
    seed: int
    before: float
    after: float


def main() -> int:
    options = parse()
    families = [f for f in FAMILIES if not options.only or f.name in options.only]
    results = [r for r in stored(options.folder) if r.seed in options.seeds]
    done = {(r.family, r.seed) for r in results}
    connect(ClusterConfig())
    try:
        for seed in options.seeds:
            for family in families:
                if (family.name, seed) not in done:
                    results.append(learn(family, seed, options.folder, options.steps))
                    keep(options.folder, results[-1])
    finally:
        ray.shutdown()
    wanted = {f.name for f in families}
    return show(families, [r for r in results if r.family in wanted])


def learn(family: Family, seed: int, folder: Path, steps: int) -> Result:
    start = prepare(folder / f"seed-{seed}", seed)
    where = free(start / family.name.replace(" ", "_").replace(",", ""))
    print(f"\n== {family.name}, seed {seed}", flush=True)
    common = {
        "run.folder": where,
        "run.seed": seed,
        "run.steps": steps,
        "model.path": start / "sft" / "model",
    }
    common |= data_of(family, start, steps)
    command = family.command
    command.run(load(command.schema, RECIPES / f"{family.source}.toml", [*(f"{k}={v}" for k, v in common.items()), *family.overrides]))
    values = read_metrics(where / "metrics.jsonl")[command.measure][1]
    return Result(family.name, seed, values[0], values[-1])


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
        more["distill.teacher"] = start / "grpo" / "model"
    return more


def prepare(start: Path, seed: int) -> Path:
    """The seed's model, data and fine-tuned model, made once."""
    if not (start / "sft" / "model" / "config.json").exists():
        make_tiny_model(start / "model", alphabet=ALPHABET, layers=4, context=64, seed=seed)
        write_reverse_task(start / "data", seed)
        sft.run(
            load(
                SFTRecipe,
                RECIPES / "quickstart_sft.toml",
                [f"run.seed={seed}", f"run.folder={free(start / 'sft')}", f"model.path={start / 'model'}", f'data.paths=["{start / "data" / "sft.jsonl"}"]'],
            )
        )
    return start


def free(folder: Path) -> Path:
    """`folder`; what an interrupted call left there is put aside."""
    if folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.interrupted-{number}")).exists():
            number += 1
        folder.rename(aside)
    return folder


def stored(folder: Path) -> list[Result]:
    path = folder / "results.jsonl"
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def keep(folder: Path, result: Result) -> None:
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def show(families: Sequence[Family], results: Sequence[Result]) -> int:
    table = Table(title="each family's own measure on held-out data")
    for column in ("family", "measure", "before", "after", "range after", "seeds improved"):
        table.add_column(column, justify="left" if column in ("family", "measure") else "right")
    failures = 0
    for family in families:
        own = [r for r in results if r.family == family.name]
        improved = sum((r.after > r.before) == family.command.more_is_better and r.after != r.before for r in own)
        failures += improved < len(own)
        after = [r.after for r in own]
        table.add_row(
            family.name,
            family.command.measure,
            f"{statistics.mean(r.before for r in own):.3f}",
            f"{statistics.mean(after):.3f}",
            f"{min(after):.3f} to {max(after):.3f}",
            f"{improved} of {len(own)}",
        )
    Console(width=130).print(table)
    return 1 if failures else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=[f.name for f in FAMILIES], metavar="FAMILY", help="default: all; distillation needs grpo's run")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=50, help="training steps of each run")
    parser.add_argument("--folder", type=Path, default=Path("runs/families"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
