"""A synchronous step with `run.prefix_overlap` against the serial one on the same two cores, and a simulation of 32 GPUs.

    python scripts/bench/rollplex.py               both mixes, a table; then the simulation
    python scripts/bench/rollplex.py --rounds 5 --mix prompt
    python scripts/bench/rollplex.py --simulate    the simulation and the table of views alone

Measured: Qwen3 of 4 layers x 256 (vocabulary 512), float32, KL to a reference; one process for the torch engine, one for the trainer (FSDP2,
one rank), which take turns in every round. A step is generation and the trainer's step; weights are not published. All three make the same
plan of the same samples' lengths:
    serial      each phase alone with two threads: colocation
    rollplex    the engine with one thread beside the prompts with one thread, then the answers with two
    apart       serial, but each process has one core for itself and leaves it idle while the other works: disaggregation
Views: what of a device's weights rollout and trainer need hold only once, by tensor-parallel degrees, in bfloat16; derived from both sides'
name-and-slice maps, which tests compare on real tensors.
Simulated: `miles.core.planning.overlap`. Its arithmetic is held against what was measured here (`predicted`); a GPU's figures are its data
sheet's, at shares of their peaks that are usual and within ranges of these, which are printed. No GPU was there to measure.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from miles.core.environment import set_defaults  # noqa: E402

set_defaults(threads=2)
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")

import numpy as np  # noqa: E402

from miles.core.planning.overlap import Phases  # noqa: E402
from miles.data.types import Group, Prompt, Sample, Status  # noqa: E402

VOCABULARY, CAPACITY = 512, 2**15


@dataclass(frozen=True)
class Mix:
    """`prompts` of P tokens with G answers of R tokens."""

    name: str
    prompts: int
    prompt: int
    response: int
    group: int


MIXES = (Mix("prompt", 8, 768, 24, 4), Mix("response", 8, 64, 96, 4))
SIDES = ("serial", "rollplex", "apart")


def main() -> int:
    parser = argparse.ArgumentParser(description="Prompts beside decoding against one phase after the other.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mix", choices=[mix.name for mix in MIXES])
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    if not options.simulate:
        print(f"{'mix':<10}{'P x R x G':<16}" + "".join(f"{side:>12}" for side in SIDES) + f"{'over serial':>14}{'over apart':>12}{'predicted':>16}")
        for mix in MIXES:
            if options.mix in (None, mix.name):
                measure(mix, options.rounds)
    simulate()
    tabulate_views()
    return 0


def measure(mix: Mix, rounds: int) -> None:
    """One line. `predicted`: both ratios as the simulation's arithmetic makes them of the phases' own seconds, did they not slow each other down."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        sides = {name: context.Pipe() for name in ("engine", "trainer")}
        children = [
            context.Process(target=target, args=(str(model), mix, sides[name][1]), daemon=True) for name, target in (("engine", engine), ("trainer", trainer))
        ]
        for child in children:
            child.start()
        ours = {name: pipe[0] for name, pipe in sides.items()}
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        phases: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            for side in SIDES:
                found = step(side, ours["engine"], ours["trainer"], number, phases if number else {})
                if number:
                    seconds[side].append(found)
        for pipe in ours.values():
            pipe.send(("end", None))
        for child in children:
            child.join()
    print(line(mix, seconds, {name: statistics.median(values) for name, values in phases.items()}), flush=True)


def line(mix: Mix, seconds: dict[str, list[float]], phases: dict[str, float]) -> str:
    middle = {side: statistics.median(values) for side, values in seconds.items()}
    ratios = [statistics.median(a / b for a, b in zip(seconds[side], seconds["rollplex"], strict=True)) for side in ("serial", "apart")]
    serial = Phases(generate=phases["generate"], prefix=phases["prefix"], rest=phases["step"]).serial
    # Beside each other both have the core that they had when alone with one thread.
    beside = Phases(generate=phases["generate, one thread"], prefix=phases["prefix, one thread"], rest=phases["step"])
    overlapped = beside.overlapped(1.0, 1.0)
    apart = beside.generate + beside.prefix + phases["step, one thread"]
    predicted = f"{serial / overlapped:.2f}, {apart / overlapped:.2f}"
    slower = (middle["rollplex"] - beside.rest) / (overlapped - beside.rest)
    title = f"{mix.name:<10}{f'{mix.prompt} x {mix.response} x {mix.group}':<16}"
    details = ", ".join(f"{name} {value:.2f}" for name, value in phases.items())
    measured = "".join(f"{middle[side]:>11.2f}s" for side in SIDES) + f"{ratios[0]:>14.2f}{ratios[1]:>12.2f}"
    return f"{title}{measured}{predicted:>16}\n    phases alone, s: {details}; beside each other {slower:.2f} times slower than alone on their cores"


def step(side: str, engine: Connection, trainer: Connection, number: int, phases: dict[str, list[float]]) -> float:
    """Seconds of one step. Every side gets prompts and seeds of its own round."""

    def note(name: str, value: float) -> None:
        phases.setdefault(name, []).append(value)

    threads = 1 if side == "apart" else 2
    started = time.perf_counter()
    if side == "rollplex":
        engine.send(("generate", (1, number)))
        trainer.send(("prefix", (1, number)))
        answers = engine.recv()
        trainer.recv()
        trainer.send(("step", (2, number, answers)))
        trainer.recv()
        return time.perf_counter() - started
    engine.send(("generate", (threads, number)))
    answers = engine.recv()
    note("generate" if threads == 2 else "generate, one thread", time.perf_counter() - started)
    # The prefix by itself only so that its seconds are known: early or late, it is the same work.
    trainer.send(("prefix", (threads, number)))
    seconds = trainer.recv()
    note("prefix" if threads == 2 else "prefix, one thread", seconds)
    trainer.send(("step", (threads, number, answers)))
    seconds = trainer.recv()
    note("step" if threads == 2 else "step, one thread", seconds)
    return time.perf_counter() - started


def make_model(folder: Path) -> Path:
    from miles.core.model.tiny import make_tiny_model

    alphabet = "".join(chr(0x100 + i) for i in range(VOCABULARY - 9))
    return make_tiny_model(folder / "model", alphabet=alphabet, hidden=256, layers=4, heads=4, kv_heads=2, context=2048)


def prompts_of(mix: Mix, number: int) -> list[Any]:
    random = np.random.default_rng([number, mix.prompt])
    return [random.integers(0, VOCABULARY - 9, mix.prompt) for _ in range(mix.prompts)]


def lengths_of(mix: Mix) -> list[int]:
    """Of the answers: between half and one and a half times R, the same in every round."""
    return np.random.default_rng(mix.response).integers(mix.response // 2, mix.response * 3 // 2 + 1, mix.prompts * mix.group).tolist()


def engine(model: str, mix: Mix, pipe: Connection) -> None:
    import torch

    from miles.core.model.config import ModelConfig
    from rollout.engines.contracts import Request, SamplingParams
    from rollout.engines.torch_engine import TorchEngine

    engines = {threads: TorchEngine(ModelConfig(path=model), max_running=256, threads=threads) for threads in (1, 2)}
    while True:
        order, given = pipe.recv()
        if order == "end":
            return
        threads, number = given
        torch.set_num_threads(threads)
        prompts = [prompt for prompt in prompts_of(mix, number) for _ in range(mix.group)]
        requests = [
            Request(request_id=str(i), prompt=prompt, sampling=SamplingParams(max_new_tokens=length, seed=i + 1000 * number))
            for i, (prompt, length) in enumerate(zip(prompts, lengths_of(mix), strict=True))
        ]
        made = asyncio.run(engines[threads].generate(requests))
        pipe.send([(one.tokens, one.logprobs) for one in made])


def trainer(model: str, mix: Mix, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from algorithms.config import AlgorithmConfig
    from miles.core.model.config import ModelConfig
    from trainer.config import TrainerConfig
    from trainer.contracts import ClaimedPrompt
    from trainer.fsdp.backend import FSDPBackend

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    backend = FSDPBackend(
        ModelConfig(path=model),
        TrainerConfig(prompt_sharing=True, max_tokens_per_microbatch=CAPACITY, lr=1e-6),
        AlgorithmConfig(kl_coef=0.01),
        temperature=1.0,
        max_new_tokens=2 * mix.response,
        seed=0,
        total_steps=1000,
        rank=0,
        world=1,
        prefix_overlap=True,
    )
    while True:
        order, given = pipe.recv()
        if order == "end":
            backend.close()
            return
        torch.set_num_threads(given[0])
        prompts = prompts_of(mix, given[1])
        started = time.perf_counter()
        if order == "prefix":
            claimed = [ClaimedPrompt(claim_id=i, tokens=tokens, count=mix.group) for i, tokens in enumerate(prompts)]
            backend.prefill(claimed, set(range(len(prompts))), backend.version)
        else:
            result = backend.step_rl(groups_of(mix, prompts, given[2], backend.version))
            assert result.metrics["sharing/ahead"] > 0, "no prompt was computed early"
        pipe.send(time.perf_counter() - started)


def groups_of(mix: Mix, prompts: list[Any], answers: list[Any], version: int) -> list[Group]:
    def sample(claim: int, place: int) -> Sample:
        tokens, logprobs = answers[place]
        return Sample(
            sample_id=str(place),
            group_id=str(claim),
            tokens=np.concatenate([prompts[claim], tokens]),
            prompt_length=mix.prompt,
            loss_mask=np.ones(len(tokens), np.bool_),
            logprobs=logprobs,
            weight_versions=np.full(len(tokens), version, np.int32),
            status=Status.TRUNCATED,
            reward=float(place % 2),
        )

    return [
        Group(
            claim_id=claim,
            prompt=Prompt(prompt_id=claim, tokens=prompt, text="", columns={}),
            samples=tuple(sample(claim, claim * mix.group + i) for i in range(mix.group)),
        )
        for claim, prompt in enumerate(prompts)
    ]


# ---- 32 GPUs, simulated


@dataclass(frozen=True)
class Machine:
    """Nominal, not measured. `flops`: of one GPU in training, after 40% utilisation. `bandwidth`: bytes/s, after 70%."""

    gpus: int = 32
    flops: float = 0.4 * 990e12
    bandwidth: float = 0.7 * 3.35e12
    slower_decode: float = 1.15
    slower_prefix: float = 1.35


@dataclass(frozen=True)
class Job:
    """A policy of `weights` parameters in bfloat16 (`key_values`: bytes of a token's keys and values in all layers), engines of `tensor` GPUs."""

    name: str
    weights: float
    key_values: float
    tensor: int
    prompts: int
    prompt: int
    response: int
    longest: int
    group: int


JOBS = (
    Job("7B, images: 4k + 0.5k, group 4", 7.6e9, 57_344, 1, 512, 4096, 512, 1024, 4),
    Job("7B, long prompts: 8k + 1k, group 8", 7.6e9, 57_344, 1, 256, 8192, 1024, 2048, 8),
    Job("7B, reasoning: 0.5k + 8k, group 8", 7.6e9, 57_344, 1, 256, 512, 8192, 16_384, 8),
    Job("32B, images: 4k + 0.5k, group 4", 32.8e9, 262_144, 4, 512, 4096, 512, 1024, 4),
)


LOW = Machine(flops=0.3 * 990e12, bandwidth=0.5 * 3.35e12)
HIGH = Machine(flops=0.5 * 990e12, bandwidth=0.85 * 3.35e12)
SLOWER = ((1.05, 1.15), (1.15, 1.35), (1.3, 1.8))
"""Of decoding and of prompts beside it: little, as nominal, and much."""


def simulate() -> None:
    machine = Machine()
    print(f"\nsimulated, {machine.gpus} GPUs: {machine}")
    print(
        f"ranges: products at 30 to 50% of their peak, bandwidth at 50 to 85%, each with the other; beside each other {SLOWER[0]} to {SLOWER[-1]} times slower"
    )
    print(f"{'job':<38}{'generate':>10}{'prefix':>9}{'rest':>9}{'serial':>9}{'rollplex':>10}{'over serial':>20}{'over apart':>20}")
    for job in JOBS:
        phases = phases_of(job, machine)
        overlapped, over_serial, over_apart = ratios_of(phases, machine, (machine.slower_decode, machine.slower_prefix))
        every = [
            ratios_of(phases_of(job, replace(machine, flops=flops, bandwidth=bandwidth)), machine, slower)
            for flops in (LOW.flops, HIGH.flops)
            for bandwidth in (LOW.bandwidth, HIGH.bandwidth)
            for slower in SLOWER
        ]
        spans = [f"{value:.2f} ({min(e[i] for e in every):.2f}-{max(e[i] for e in every):.2f})" for i, value in ((1, over_serial), (2, over_apart))]
        seconds = f"{phases.generate:>9.1f}s{phases.prefix:>8.1f}s{phases.rest:>8.1f}s{phases.serial:>8.1f}s{overlapped:>9.1f}s"
        print(f"{job.name:<38}{seconds}{spans[0]:>20}{spans[1]:>20}")
    print(f"{'the paper':<38}{'':>45}{'1.23-1.30':>20}{'1.57-2.24':>20}")


def ratios_of(phases: Phases, machine: Machine, slower: tuple[float, float]) -> tuple[float, float, float]:
    """Seconds of a step with prompts beside decoding; serial steps and those of the best disaggregation over it."""
    overlapped = phases.overlapped(*slower)
    apart = min(phases.disaggregated(share / machine.gpus) for share in range(4, machine.gpus, 4))
    return overlapped, phases.serial / overlapped, apart / overlapped


def phases_of(job: Job, machine: Machine) -> Phases:
    """Products of 2 float operations a weight and token; decoding is bound by the bytes of weights and of keys and values that each step reads."""
    all_flops = machine.gpus * machine.flops
    prompt_tokens, answer_tokens = job.prompts * job.prompt, job.prompts * job.group * job.response
    engines = machine.gpus // job.tensor
    rows = job.prompts * job.group / engines
    prefill = 2 * job.weights * prompt_tokens / all_flops
    # Rows end one by one, the longest last: on average `rows` x mean / longest of them are there in a step.
    alive = rows * job.response / job.longest
    bytes_a_step = 2 * job.weights + alive * (job.prompt + job.response / 2) * job.key_values
    decode = job.longest * bytes_a_step / (machine.bandwidth * job.tensor)
    prefix = 2 * 2 * job.weights * prompt_tokens / all_flops  # reference and policy
    # Of the answers: the reference's forward, the policy's forward and backward; of the prompts: the policy's backward.
    rest = (2 + 6) * job.weights * answer_tokens / all_flops + 4 * job.weights * prompt_tokens / all_flops
    return Phases(generate=prefill + decode, prefix=prefix, rest=rest)


def tabulate_views() -> None:
    from miles.core.sharding.engine_layout import engine_parts, separate_parts
    from miles.core.sharding.views import beside, saved_bytes, views
    from trainer.megatron.architecture import Architecture
    from trainer.megatron.layout import Layout
    from trainer.megatron.names import parts

    sizes = {"layers": 36, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_width": 128, "feed_forward": 12_288, "vocabulary": 151_936}
    architecture = Architecture(family="qwen3", tied=False, norm_epsilon=1e-6, windows=(None,) * 36, head_norm=True, **sizes)
    print(
        f"\nviews, a Qwen3 of 8B; trainer's layout:\n{'engine TP':>10}{'trainer TP':>11}{'smaller shard':>15}  {'as the engine':<20}{'separate':<20}Megatron's"
    )
    layouts = (engine_parts, separate_parts, lambda sizes, degree, rank: parts(sizes, Layout(tensor=degree), rank)[0])
    for engine, trainer in ((a, b) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8)):
        of_engine, of_trainer = beside(0, engine, trainer)
        told = []
        for held in layouts:
            sides = engine_parts(architecture, engine, of_engine), held(architecture, trainer, of_trainer)
            rows = views(*(sides if engine > trainer else sides[::-1]), itemsize=2)
            total = sum(row.bytes for row in rows)
            told.append(f"{saved_bytes(rows) / 2**30:.2f} GiB = {saved_bytes(rows) / total:.0%}")
        print(f"{engine:>10}{trainer:>11}{total / 2**30:>11.2f} GiB  {told[0]:<20}{told[1]:<20}{told[2]}")


if __name__ == "__main__":
    sys.exit(main())
