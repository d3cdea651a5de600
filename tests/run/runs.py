"""Small real runs for the end-to-end tests: recipes on the reversal task, and what a run left behind."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

from miles.config import Resolved, load
from miles.core.model.tiny import make_tiny_model
from miles.data.toy import ALPHABET, write_reverse_task
from miles.run.recipe import RLRecipe, SFTRecipe


def make_task(folder: Path) -> dict[str, Path]:
    """A model of two small layers and the reversal task's files under `folder`."""
    paths = write_reverse_task(folder / "data", seed=0, train=8, sft=64, test=8, pairs=8)
    return paths | {"model": make_tiny_model(folder / "model", alphabet=ALPHABET, hidden=32, layers=2, context=64)}


def rl_overrides(task: dict[str, Path], folder: Path, *overrides: str) -> list[str]:
    return [
        f"run.folder={folder}",
        "run.steps=4",
        f"model.path={task['model']}",
        f'data.paths=["{task["train"]}"]',
        "rollout.prompts_per_step=4",
        "rollout.samples_per_prompt=4",
        "rollout.max_new_tokens=6",
        'reward.functions=[{name="tests.run.runs:share_of_a"}]',
        "trainer.lr=1e-2",
        "checkpoint.export=false",
        "weight_sync.verify=always",
        *overrides,
    ]


def rl_recipe(task: dict[str, Path], folder: Path, *overrides: str) -> Resolved[RLRecipe]:
    return load(RLRecipe, None, rl_overrides(task, folder, *overrides))


def sft_recipe(task: dict[str, Path], folder: Path, *overrides: str) -> Resolved[SFTRecipe]:
    return load(
        SFTRecipe,
        None,
        [
            f"run.folder={folder}",
            "run.steps=4",
            "batch_size=8",
            f"model.path={task['model']}",
            f'data.paths=["{task["sft"]}"]',
            "data.messages_column=messages",
            "trainer.lr=1e-2",
            *overrides,
        ],
    )


def share_of_a(sample: Any, *, prompt: Any, text: str) -> float:
    """A dense reward that a random model can climb."""
    return text.count("a") / max(len(text), 1)


async def after_a_while(sample: Any, *, prompt: Any, text: str) -> float:
    """`share_of_a` after a time that is log-normal with a long tail, as of an environment: 0.2 s in the middle, 4 s one time in a hundred."""
    rng = np.random.default_rng(list(sample.sample_id.encode()))
    await asyncio.sleep(0.2 * float(np.exp(1.29 * rng.standard_normal())))
    return share_of_a(sample, prompt=prompt, text=text)


async def share_of(sample: Any, *, prompt: Any, text: str, letter: str) -> float:
    """As `share_of_a`; in the rollout actor itself, which costs no process."""
    return text.count(letter) / max(len(text), 1)


async def always_raises(sample: Any, *, prompt: Any, text: str) -> float:
    raise KeyError("what the grader looked for")


async def never_for_claim_2(sample: Any, *, prompt: Any, text: str) -> float:
    """`share_of_a`, but for one claim, whose reward takes longer than any test."""
    if sample.group_id == "2":
        await asyncio.sleep(3600)
    return share_of_a(sample, prompt=prompt, text=text)


def kills_who_evaluates_version_2(sample: Any, *, prompt: Any, text: str, flag: str) -> float:
    """`share_of_a`, except that the first answer of an evaluation at version 2 kills its actor, whose child this reward worker is."""
    if sample.group_id.startswith("-") and sample.weight_versions.max() == 2 and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getppid(), signal.SIGKILL)
    return share_of_a(sample, prompt=prompt, text=text)


def asks_for_engines(sample: Any, *, prompt: Any, text: str, folder: str) -> float:
    """`share_of_a`; the first call of all asks for two engines more, and the 40th (in the third step of 16 samples) for one in all."""
    from miles.run.engines import ask

    with (Path(folder).parent / "calls").open("a") as calls:
        calls.write(".")
        if (number := calls.tell()) in (1, 40):
            ask(Path(folder), 3 if number == 1 else 1)
    return share_of_a(sample, prompt=prompt, text=text)


def kills_its_engine_once(sample: Any, *, prompt: Any, text: str, flag: str) -> float:
    """`share_of_a`, except that the 40th call of all (in the third step of 16 samples) kills the rollout actor, whose child this reward worker is."""
    with Path(flag).open("a") as calls:
        calls.write(".")
    if Path(flag).stat().st_size == 40:
        os.kill(os.getppid(), signal.SIGKILL)
    return share_of_a(sample, prompt=prompt, text=text)


def records(folder: Path) -> list[dict[str, Any]]:
    """The run's metric records in order."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def learned(folder: Path) -> list[dict[str, Any]]:
    """Records without what a clock decides."""
    timed = ("seconds/", "throughput/", "time", "_")
    return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in records(folder)]


def weights(folder: Path) -> dict[str, str]:
    """sha256 of every tensor of the exported model."""
    from safetensors.torch import load_file

    tensors: dict[str, str] = {}
    for file in sorted((folder / "model").glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors[name] = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
    return tensors
