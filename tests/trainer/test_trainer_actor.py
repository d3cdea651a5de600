"""The trainer behind Ray: ranks in processes of their own, and faults that reach the driver with their traceback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from algorithms.config import AlgorithmConfig
from miles.config import ConfigError
from miles.core.checkpoint.config import CheckpointConfig
from miles.core.checkpoint.store import MANIFEST, CheckpointStore
from miles.core.model.config import ModelConfig
from tests.trainer_cases import environment_of, kill_rank_1, make_group, make_sample, raise_on_rank_1
from trainer.actor import TrainerError, TrainerGroup
from trainer.config import TrainerConfig


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def group(ray_cluster: None, tiny_model: Path, loop: asyncio.AbstractEventLoop) -> Iterator[TrainerGroup]:
    group = TrainerGroup(
        model=ModelConfig(path=str(tiny_model)),
        trainer=TrainerConfig(ranks=2, lr=1e-3),
        algorithm=AlgorithmConfig(),
        checkpoint=CheckpointConfig(keep=1),
        temperature=1.0,
        max_new_tokens=16,
        seed=0,
        total_steps=10,
    )
    loop.run_until_complete(group.start())
    yield group
    loop.run_until_complete(group.close())


def test_two_ranks_train_save_and_resume(group: TrainerGroup, loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    batch = [make_group(0, [make_sample(0, i, 4, 6, reward=float(i)) for i in range(4)])]
    store = CheckpointStore(tmp_path)

    async def scenario() -> tuple[Any, ...]:
        await group.step_rl(batch)
        await group.save(store.begin(1), {"cursor": 3})
        first = await group.step_rl(batch)
        scores = await group.logprobs(batch[0].samples)
        await group.wait_saved()
        extra = await group.load(store.begin(1))
        again = await group.step_rl(batch)
        rescored = await group.logprobs(batch[0].samples)
        await group.export(tmp_path / "model")
        threads = await group.run_on_ranks(environment_of)
        return first, scores, extra, again, rescored, threads

    first, scores, extra, again, rescored, threads = loop.run_until_complete(scenario())
    assert extra == {"cursor": 3}
    assert again == first
    assert rescored == scores
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert threads == [(0, "PASSIVE", "1", 1, True), (1, "PASSIVE", "1", 1, True)]


def test_a_checkpoint_that_does_not_fit_is_a_plain_error(group: TrainerGroup, loop: asyncio.AbstractEventLoop, tmp_path: Path) -> None:
    dcp.save({"model.other": torch.zeros(3)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / MANIFEST).write_text(json.dumps({"world": 2, "state": {}, "extra": {}}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"does not fit: tensor '[^']*': .*\. Go on with the model and trainer that wrote it"):
        loop.run_until_complete(group.load(tmp_path))


def test_what_a_rank_raises_reaches_the_driver_with_rank_and_traceback(group: TrainerGroup, loop: asyncio.AbstractEventLoop) -> None:
    """Rank 0 waits for rank 1 in a collective, so the driver must not wait for rank 0. It waits there still in the next test."""
    with pytest.raises(TrainerError, match=r"trainer rank 1 of 2 failed:(.|\n)*raise_on_rank_1(.|\n)*ZeroDivisionError"):
        loop.run_until_complete(asyncio.wait_for(group.run_on_ranks(raise_on_rank_1), 30))


def test_a_rank_that_is_killed_is_named(group: TrainerGroup, loop: asyncio.AbstractEventLoop) -> None:
    with pytest.raises(TrainerError, match="trainer rank 1 of 2 died"):
        loop.run_until_complete(asyncio.wait_for(group.run_on_ranks(kill_rank_1), 60))


def test_places_must_be_one_a_rank(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.ranks = 2, but 1 places"):
        TrainerGroup(
            model=ModelConfig(path=str(tiny_model)),
            trainer=TrainerConfig(ranks=2),
            algorithm=None,
            checkpoint=CheckpointConfig(),
            temperature=1.0,
            max_new_tokens=16,
            seed=0,
            total_steps=1,
            places=["DEFAULT"],
        )
