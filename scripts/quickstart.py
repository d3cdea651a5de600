"""The main job end to end: make a model and data, fine-tune, evaluate, train with RL, evaluate again, show the result.

Everything here is a thin call of what `miles sft`, `miles rl` and `miles evaluate` run; one Ray cluster serves all of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from miles.core.environment import set_defaults

set_defaults()  # before anything imports torch

import ray  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from miles.config import ConfigError, Resolved, Section, load  # noqa: E402
from miles.core.model.tiny import make_tiny_model  # noqa: E402
from miles.data.toy import ALPHABET, write_reverse_task  # noqa: E402
from miles.run import evaluate, rl, sft  # noqa: E402
from miles.run.cluster import connect  # noqa: E402
from miles.run.recipe import ClusterConfig, EvaluateRecipe, RLRecipe, SFTRecipe  # noqa: E402
from miles.run.report import page  # noqa: E402
from miles.tracking.jsonl import read_metrics, read_records  # noqa: E402

RECIPES = Path(__file__).parent / "recipes"
T = TypeVar("T", bound=Section)


@dataclass(frozen=True)
class Stage:
    """A row of the closing table. Accuracies are shares of the test words; tokens per second are None where nothing is trained."""

    name: str
    sampled: float
    greedy: float
    seconds: float
    tokens_per_s: float | None


def main() -> int:
    options = parse()
    folder = Path(options.folder) if options.folder else free_folder(Path("runs/quickstart"))
    start = time.time()
    make_tiny_model(folder / "model", alphabet=ALPHABET, layers=4, context=64, seed=options.seed)
    write_reverse_task(folder / "data", options.seed)
    connect(ClusterConfig())
    try:
        stages = run_stages(folder, options)
    finally:
        ray.shutdown()
    html, picture = page.write(folder / "rl")
    first_step = next(iter(read_records(folder / "sft" / "metrics.jsonl")))["time"] - start
    show(stages, time.time() - start)
    print(f"the first optimizer step was done after {first_step:.0f} s")
    print(f"curves      {picture}\npage        {html}\nrun folder  {folder}\nmodel       {folder / 'rl' / 'model'} (an ordinary Hugging Face directory)")
    return 0


def run_stages(folder: Path, options: argparse.Namespace) -> list[Stage]:
    """SFT, a look at the model it started from, RL; the RL run itself evaluates before its first and after its last step."""
    common = [f"run.seed={options.seed}"]
    test_data = f'evaluate.data.paths=["{folder / "data" / "test.jsonl"}"]'
    say("1/3 supervised fine-tuning")
    began = time.perf_counter()
    sft.run(
        recipe(
            SFTRecipe,
            "quickstart_sft",
            common,
            f"run.folder={folder / 'sft'}",
            f"model.path={folder / 'model'}",
            f'data.paths=["{folder / "data" / "sft.jsonl"}"]',
            *override("run.steps", options.sft_steps),
        )
    )
    sft_seconds = time.perf_counter() - began

    say("2/3 the untrained model on the test words, to compare with")
    began = time.perf_counter()
    before = evaluate.run(
        recipe(EvaluateRecipe, "quickstart_evaluate", common, f"run.folder={folder / 'untrained'}", f"model.path={folder / 'model'}", test_data)
    )
    stages = [Stage("untrained", before.metrics["eval/pass_at_1"], before.metrics["eval/greedy"], time.perf_counter() - began, None)]

    say("3/3 reinforcement learning (GRPO)")
    began = time.perf_counter()
    rl.run(
        recipe(
            RLRecipe,
            "quickstart_rl",
            common,
            f"run.folder={folder / 'rl'}",
            f"model.path={folder / 'sft' / 'model'}",
            f'data.paths=["{folder / "data" / "train.jsonl"}"]',
            test_data,
            *override("run.steps", options.rl_steps),
        )
    )
    rl_seconds = time.perf_counter() - began
    curves = read_metrics(folder / "rl" / "metrics.jsonl")
    sampled, greedy = curves["eval/pass_at_1"][1], curves["eval/greedy"][1]
    stages.append(Stage("after SFT", sampled[0], greedy[0], sft_seconds, rate(folder / "sft", "throughput/trained_tokens_per_s", "seconds/train")))
    stages.append(Stage("after RL", sampled[-1], greedy[-1], rl_seconds, rate(folder / "rl", "throughput/generated_tokens_per_s", "seconds/step")))
    return stages


def recipe(schema: type[T], name: str, common: list[str], *overrides: str) -> Resolved[T]:
    return load(schema, RECIPES / f"{name}.toml", [*common, *overrides])


def override(key: str, value: int | None) -> list[str]:
    return [] if value is None else [f"{key}={value}"]


def rate(folder: Path, throughput: str, seconds: str) -> float:
    """Tokens of the whole run over the seconds they took."""
    curves = read_metrics(folder / "metrics.jsonl")
    times = curves[seconds][1]
    return sum(t * s for t, s in zip(curves[throughput][1], times, strict=True)) / sum(times)


def free_folder(base: Path) -> Path:
    """`base`, or the first of `base-2`, `base-3`, ... that does not exist: an earlier quickstart is never overwritten."""
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


def show(stages: list[Stage], seconds: float) -> None:
    table = Table(title="share of 256 unseen words reversed right")
    for column in ("", "sampled", "greedy", "seconds", "tokens/s"):
        table.add_column(column, justify="left" if not column else "right")
    for stage in stages:
        speed = "" if stage.tokens_per_s is None else f"{stage.tokens_per_s:,.0f}"
        table.add_row(stage.name, f"{stage.sampled:.2f}", f"{stage.greedy:.2f}", f"{stage.seconds:.0f}", speed)
    Console().print(table)
    print("tokens/s: trained tokens for SFT, generated tokens over whole steps for RL")
    print(f"everything together took {seconds:.0f} s\n")


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make a small model, fine-tune it, train it with GRPO, and show what it learned. A few minutes on 2 cores.")
    parser.add_argument("--folder", help="where everything goes; default runs/quickstart, or the next free runs/quickstart-N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft-steps", type=int, help="default: the recipe's")
    parser.add_argument("--rl-steps", type=int, help="default: the recipe's")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        sys.exit(130)
