"""A whole GRPO training step of Miles against one of TRL's GRPOTrainer, in CPU-seconds, on one machine without a GPU.

    python scripts/bench/trl.py                 both sizes, a table with the bound beside each figure
    python scripts/bench/trl.py --sizes small --steps 30

Both sides load the same model directory and train on the same prompts with the same reward, group size, objective, optimizer and
learning rate: 4 prompts x 8 samples a step, one thread a process. Each side is one long-lived process tree, and they take turns step
by step, so that whatever else the machine does falls on both. A step is everything from one to the next: generation, rewards,
loss, optimizer, weight sync and logging. CPU-seconds are user and system time of trainer and engine processes: all of TRL's one process,
and for Miles the trainer rank and the rollout actor, which the bound is for. The driver, which only hands out work and writes the log,
is shown beside them; Ray's own services are not counted.

Exit code 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A script's own folder comes first on the path, where this file would hide the package it is named after.
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() not in (Path(__file__).resolve().parent, ROOT))]

from miles.core.environment import set_defaults  # noqa: E402

set_defaults(threads=1)
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import psutil  # noqa: E402

from scripts.bench import digits  # noqa: E402

PROMPTS, GROUP, LEARNING_RATE, CLIP = 4, 8, 1e-3, 0.2
WARM_UP = 3
WINDOW = 10


@dataclass(frozen=True)
class Size:
    """A model and the longest answer; `bound` is how much of TRL's CPU-seconds a step may take."""

    hidden: int
    layers: int
    new_tokens: int
    steps: int
    bound: float


SIZES = {"small": Size(64, 2, 64, 100, 0.6), "large": Size(256, 4, 128, 20, 0.7)}


@dataclass(frozen=True)
class Step:
    """CPU-seconds of one step by process, its mean reward, and the mean length of its answers in tokens."""

    cpu: dict[str, float]
    reward: float
    length: float


@dataclass
class Side:
    """One system at work in its own process."""

    name: str
    process: multiprocessing.process.BaseProcess
    connection: Connection
    steps: list[Step] = field(default_factory=list)

    def advance(self) -> None:
        try:
            self.connection.send("go")
            self.steps.append(self.connection.recv())
        except (EOFError, BrokenPipeError):
            raise SystemExit(f"{self.name} ended in step {len(self.steps) + 1}; its last words are above") from None

    def cpu(self, *parts: str) -> float:
        """CPU-seconds of a step in these processes: the mean of the middle half of the steps after the warm-up.

        The system counts in ticks of 10 ms, too coarse for a median, and a neighbour's burst is no part of a plain step.
        """
        spent = sorted(sum(step.cpu[part] for part in parts) for step in self.steps[WARM_UP:])
        return statistics.mean(spent[len(spent) // 4 : len(spent) - len(spent) // 4])

    def last_reward(self) -> float:
        return statistics.mean(step.reward for step in self.steps[-WINDOW:])

    def length(self) -> float:
        return statistics.mean(step.length for step in self.steps[WARM_UP:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--steps", type=int, help="training steps of each side; the default is the size's own")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    missed = 0
    for name in options.sizes:
        size = SIZES[name]
        with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
            sides = compare(size, options.steps or size.steps, options.seed, Path(folder))
        missed += show(name, size, *sides)
    return 1 if missed else 0


def compare(size: Size, steps: int, seed: int, folder: Path) -> tuple[Side, Side]:
    """Run both sides in turns for `steps` steps."""
    digits.write_model(folder / "model", size.hidden, size.layers, seed)
    digits.write_prompts(folder / "prompts.jsonl")
    peer, ours = (start(name, run, size, steps, seed, folder) for name, run in (("TRL", run_peer), ("Miles", run_ours)))
    try:
        for step in range(steps):
            # Who goes first changes, so that neither always finds the caches warm.
            for side in (peer, ours) if step % 2 == 0 else (ours, peer):
                side.advance()
    finally:
        for side in (peer, ours):
            side.connection.close()
            side.process.join(60)
            if side.process.is_alive():
                side.process.terminate()
    return peer, ours


def start(name: str, run: Callable[..., None], size: Size, steps: int, seed: int, folder: Path) -> Side:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=quietly, args=(run, there, folder / f"{name}.log", size, steps, seed, folder), name=name)
    process.start()
    there.close()
    return Side(name, process, here)


def quietly(run: Callable[..., None], connection: Connection, log: Path, *args: object) -> None:
    """Run a side with its output in a file; what it raises is shown from there."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        shown = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            run(connection, *args)
        except (EOFError, BrokenPipeError):
            pass  # the parent has ended, and with it the benchmark
        except BaseException:  # shown and raised again: nothing is swallowed
            file.flush()
            os.write(shown, log.read_bytes()[-4000:])
            raise


def run_peer(connection: Connection, size: Size, steps: int, seed: int, folder: Path) -> None:
    """TRL's trainer; a callback hands the turn over after each step's log."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    me = psutil.Process()

    class Turns(TrainerCallback):
        began = 0.0

        def on_train_begin(self, args, state, control, **more):  # type: ignore[no-untyped-def]
            self.wait()

        def on_log(self, args, state, control, logs=None, **more):  # type: ignore[no-untyped-def]
            if "reward" not in logs:
                return
            connection.send(Step({"trainer": busy(me) - self.began}, float(logs["reward"]), float(logs["completions/mean_length"])))
            if state.global_step < steps:
                self.wait()

        def wait(self) -> None:
            connection.recv()
            self.began = busy(me)

    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        num_generations=GROUP,
        per_device_train_batch_size=PROMPTS * GROUP,
        max_completion_length=size.new_tokens,
        temperature=1.0,
        beta=0.0,
        epsilon=CLIP,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=seed,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=digits.peer_reward,  # type: ignore[arg-type]
        args=config,
        train_dataset=Dataset.from_list(digits.rows()),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Turns()],
    )
    trainer.train()


def run_ours(connection: Connection, size: Size, steps: int, seed: int, folder: Path) -> None:
    """The product's own parts, Ray included, in the order of `miles/run/rl.py`, with a turn handed over after each step."""
    asyncio.run(_run_ours(connection, size, steps, seed, folder))


async def _run_ours(connection: Connection, size: Size, steps: int, seed: int, folder: Path) -> None:
    from miles.config import Resolved
    from miles.run.assemble import assemble
    from miles.run.clock import Clock
    from miles.run.recipe import RLRecipe

    os.environ["PYTHONPATH"] = str(ROOT)  # the actors import the reward
    recipe = RLRecipe.model_validate(
        {
            "run": {"folder": str(folder / "run"), "steps": steps, "seed": seed},
            "model": {"path": str(folder / "model")},
            "data": {"paths": [str(folder / "prompts.jsonl")]},
            "rollout": {"engine": "torch", "prompts_per_step": PROMPTS, "samples_per_prompt": GROUP, "max_new_tokens": size.new_tokens},
            "reward": {"functions": [{"name": "scripts.bench.digits:reward"}]},
            "algorithm": {"clip_low": CLIP, "clip_high": CLIP},
            "trainer": {"lr": LEARNING_RATE, "betas": (0.9, 0.999), "clip_norm": 1.0},
            "tracking": {"sample_every": 0},
        }
    )
    with assemble(Resolved(recipe, {}), resume=False) as run:
        try:
            await run.start()
            processes = {"driver": psutil.Process(), **actors()}
            while run.version < steps:
                await asyncio.to_thread(connection.recv)
                began = {name: busy(process) for name, process in processes.items()}
                clock = Clock()
                with clock("rollout_wait"):
                    batch = await run.producer.take(run.version)
                with clock("train"):
                    trained = await run.trainer.step_rl(batch.groups)
                run.producer.trained(batch.groups)
                with clock("weight_sync"):
                    published = await run.publish()
                run.record(clock, batch, trained, published, None)
                cpu = {name: busy(process) - began[name] for name, process in processes.items()}
                connection.send(Step(cpu, trained.metrics["reward/mean"], trained.metrics["length/mean"]))
        finally:
            await run.close()


def actors() -> dict[str, psutil.Process]:
    """Ray's worker processes of this run's trainer rank and engine, found by the title that Ray gives them."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        for name, actor in (("trainer", "ray::TrainerRank"), ("engine", "ray::RolloutActor")):
            if title.startswith(actor):
                found[name] = process
    assert set(found) == {"trainer", "engine"}, found
    return found


def busy(process: psutil.Process) -> float:
    """CPU-seconds of all threads of a process so far."""
    times = process.cpu_times()
    return times.user + times.system


def show(name: str, size: Size, peer: Side, ours: Side) -> int:
    """Print the comparison; returns the number of missed bounds."""
    from rich.console import Console
    from rich.table import Table

    theirs, mine, with_driver = peer.cpu("trainer"), ours.cpu("trainer", "engine"), ours.cpu("trainer", "engine", "driver")
    fast, good = mine / theirs <= size.bound, ours.last_reward() >= peer.last_reward() - 0.02
    table = Table(
        title=f"{name}: hidden {size.hidden}, {size.layers} layers, {PROMPTS * GROUP} sequences x {size.new_tokens} new tokens, {len(ours.steps)} steps"
    )
    for column in ("", "TRL", "Miles", "Miles / TRL", "bound", ""):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    verdict = {True: "ok", False: "missed"}
    table.add_row("CPU-s a step", f"{theirs:.3f}", f"{mine:.3f}", f"{mine / theirs:.2f}", f"{size.bound:.2f}", verdict[fast])
    table.add_row("  with the driver", "", f"{with_driver:.3f}", f"{with_driver / theirs:.2f}", "", "")
    for part in ("trainer", "engine", "driver"):
        table.add_row(f"  {part}", "", f"{ours.cpu(part):.3f}", "", "", "")
    table.add_row(f"reward, last {WINDOW} steps", f"{peer.last_reward():.3f}", f"{ours.last_reward():.3f}", "", ">= TRL - 0.02", verdict[good])
    table.add_row("tokens an answer", f"{peer.length():.1f}", f"{ours.length():.1f}", "", "", "")
    Console().print(table)
    return (not fast) + (not good)


if __name__ == "__main__":
    sys.exit(main())
