"""What working ahead is worth where trajectories have a long tail: samples per second of one loop at max_staleness 0, 1 and 4, and at 0 with
half a batch of prompts more than it needs, of which the slowest are aborted.

    python scripts/bench/staleness.py
    python scripts/bench/staleness.py --steps 40 --p50 0.2

The loop is the real one: Ray, a torch engine, the trainer, weight sync. An environment is simulated by a reward that takes a log-normal
time (p50 as given, p99 twenty times that), and a larger model by a loss that waits as long as a synchronous rollout takes on average, so
that a synchronous step is half rollout and half training. Nothing of this needs the processor, so two cores measure the schedule and not
themselves. A step cannot be shorter than the longer of the two: that bound stands beside each figure, and so does what was refused as
too old, with the length bias of refusing.

Exit code 1 when 4 versions of staleness give less than 1.8 times the synchronous samples per second.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# A script's own folder comes first on the path, where this file would hide the package it is named after.
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() not in (Path(__file__).resolve().parent, ROOT))]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from miles.core.environment import set_defaults  # noqa: E402

set_defaults(threads=1)
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import numpy as np  # noqa: E402

BOUND = 1.8
PROMPTS, GROUP, SKIP, EXTRA = 4, 4, 5, 2
SIGMA = math.log(20) / 2.3263  # p99 is twenty times p50


async def environment(sample: Any, *, prompt: Any, text: str, p50: float) -> float:
    """The reward: the share of `a` in the answer, after a time that depends on nothing but the sample's name."""
    await asyncio.sleep(latency(sample.sample_id, p50))
    return text.count("a") / max(len(text), 1)


def latency(name: str, p50: float) -> float:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return p50 * math.exp(SIGMA * float(np.random.default_rng(seed).standard_normal()))


def mean_rollout(p50: float, steps: int) -> float:
    """Seconds of a synchronous rollout on average: its slowest sample."""
    slowest = [max(latency(f"{claim}/{i}", p50) for claim in range(PROMPTS * s, PROMPTS * (s + 1)) for i in range(GROUP)) for s in range(steps)]
    return sum(slowest) / steps


def slow_loss(tokens: Any, config: Any) -> Any:
    """The clipped loss of PPO, after the time that a larger model would take."""
    from algorithms.ppo_clip import ppo_clip

    time.sleep(float(os.environ["MILES_BENCH_TRAIN_S"]))
    return ppo_clip(tokens, config)


@dataclass(frozen=True)
class Figures:
    """Of one run, without its first steps."""

    samples_per_s: float
    step_s: float
    staleness: float
    refused: float
    length: float
    refused_length: float | None


def measure(folder: Path, staleness: int, options: argparse.Namespace, extra: int = 0) -> Figures:
    from miles.config import load
    from miles.run import rl
    from miles.run.recipe import RLRecipe

    run = folder / f"staleness-{staleness}-{extra}"
    rl.run(
        load(
            RLRecipe,
            None,
            [
                f"run.folder={run}",
                f"run.steps={options.steps}",
                f"run.max_staleness={staleness}",
                f"model.path={folder / 'model'}",
                f'data.paths=["{folder / "data" / "train.jsonl"}"]',
                f"rollout.prompts_per_step={PROMPTS}",
                f"rollout.extra_prompts={extra}",
                f"rollout.samples_per_prompt={GROUP}",
                "rollout.max_new_tokens=8",
                "rollout.max_attempts=10",
                f'reward.functions=[{{name="scripts.bench.staleness:environment", args={{p50={options.p50}}}}}]',
                "reward.timeout_s=600",
                "algorithm.loss=scripts.bench.staleness:slow_loss",
                "checkpoint.export=false",
            ],
        )
    )
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][SKIP:]
    seconds = records[-1]["time"] - records[0]["time"]
    refused = [r["length/refused_mean"] for r in records if "length/refused_mean" in r]
    return Figures(
        samples_per_s=(len(records) - 1) * PROMPTS * GROUP / seconds,
        step_s=seconds / (len(records) - 1),
        staleness=max(r["staleness/max"] for r in records),
        refused=sum(r["groups/refused_stale"] + r["groups/aborted"] for r in records) / len(records),
        length=sum(r["length/mean"] for r in records) / len(records),
        refused_length=sum(refused) / len(refused) if refused else None,
    )


def main() -> int:
    options = parse()
    from rich.console import Console
    from rich.table import Table

    from miles.core.model.tiny import make_tiny_model
    from miles.data.toy import ALPHABET, write_reverse_task

    train = mean_rollout(options.p50, options.steps)
    os.environ["MILES_BENCH_TRAIN_S"] = str(train)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(folder / "model", alphabet=ALPHABET, hidden=32, layers=2, context=64)
        write_reverse_task(folder / "data", 0)
        runs = {str(staleness): measure(folder, staleness, options) for staleness in (0, 1, 4)}
        runs[f"0, {EXTRA} extra"] = measure(folder, 0, options, EXTRA)
    table = Table(title=f"train {train:.2f} s, synchronous rollout {train:.2f} s on average, p50 {options.p50} s, p99 {20 * options.p50:g} s")
    for column in ("max_staleness", "samples/s", "of synchronous", "step", "longer of the two", "staleness", "refused, aborted/step", "length", "of refused"):
        table.add_column(column, justify="right")
    base = runs["0"].samples_per_s
    for staleness, f in runs.items():
        ratio, refused = f"{f.samples_per_s / base:.2f}", "" if f.refused_length is None else f"{f.refused_length:.2f}"
        row = (
            staleness,
            f"{f.samples_per_s:.2f}",
            ratio,
            f"{f.step_s:.2f} s",
            f"{train:.2f} s",
            f"{f.staleness:g}",
            f"{f.refused:.2f}",
            f"{f.length:.2f}",
            refused,
        )
        table.add_row(*map(str, row))
    Console(width=140).print(table)
    print(f"bound: {BOUND} times synchronous at 4, and a step within 10% of the longer of the two: {runs['4'].step_s / train:.2f}")
    return 0 if runs["4"].samples_per_s >= BOUND * base else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--p50", type=float, default=0.2, help="seconds of the median sample; the tail must be long beside the loop's own work")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
