"""Rollplex in the one loop, everything real: prompts are computed while engines decode, and nobody can tell from the weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from miles.config import ConfigError
from miles.run import rl
from miles.run.prefix_overlap import PrefixOverlap
from rollout.producer import Producer
from tests.rollout.test_producer import SAME, Fleet, at, failed, producer, run, settle
from tests.run.runs import learned, make_task, records, rl_recipe, weights
from trainer.contracts import ClaimedPrompt

OPTIONS = ("run.prefix_overlap=true", "model.true_on_policy=true", "algorithm.kl_coef=0.05", "run.steps=3", "checkpoint.export=true")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.mark.full
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_whose_engine_is_killed_during_the_overlap_equals_the_serial_one(task: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the third step, when the trainer has its prompts: the fresh engine takes up the old version from it, and the step goes on. The weights,
    which lie in memory once, have not moved meanwhile."""
    reward = f'reward.functions=[{{name="tests.run.runs:kills_its_engine_once", args={{flag="{tmp_path / "flag"}"}}}}]'
    rl.run(rl_recipe(task, tmp_path / "overlapped", *OPTIONS, "weight_sync.transport=views", reward))
    assert not actors_left()
    monkeypatch.setattr(PrefixOverlap, "submitted", lambda overlap, claim_ids: None)  # the same plans, with the answers
    rl.run(rl_recipe(task, tmp_path / "serial", *OPTIONS))
    assert weights(tmp_path / "overlapped") == weights(tmp_path / "serial")
    overlapped, serial = records(tmp_path / "overlapped"), learned(tmp_path / "serial")
    assert [r["groups/failed"] > 0 for r in overlapped] == [False, False, True]
    assert all(r["sharing/ahead"] > 0.1 and r["mismatch/logprob_abs_max"] == 0.0 for r in overlapped)
    assert all(r["weight_sync/bytes"] == 0 for r in overlapped)
    of_overlap = {"sharing/ahead", "groups/failed", "weight_sync/bytes"}
    assert [{k: v for k, v in r.items() if k not in of_overlap} for r in learned(tmp_path / "overlapped")] == [
        {k: v for k, v in r.items() if k not in of_overlap} for r in serial
    ]


class Trainer:
    """Keeps what it is told; a call ends when the test says."""

    def __init__(self) -> None:
        self.told: list[tuple[list[int], set[int], int]] = []
        self.calls: list[asyncio.Future[None]] = []

    async def prefill(self, prompts: Sequence[ClaimedPrompt], open_claims: set[int], version: int) -> None:
        assert all(prompt.count == 2 for prompt in prompts)
        self.told.append(([prompt.claim_id for prompt in prompts], open_claims, version))
        self.calls.append(asyncio.get_running_loop().create_future())
        await self.calls[-1]


def overlapped(dynamic_sampling: bool = False) -> tuple[Fleet, Trainer, Producer, PrefixOverlap]:
    fleet, trainer = Fleet(), Trainer()
    made = producer(fleet, dynamic_sampling=dynamic_sampling)
    overlap = PrefixOverlap(trainer, made, 2, lambda: 7)  # type: ignore[arg-type]
    made.submitted = overlap.submitted
    return fleet, trainer, made, overlap


def test_prompts_are_announced_once_and_dropped_groups_are_no_longer_open() -> None:
    """The second round has a retried claim, whose prompt the trainer has, and one in the place of a group that teaches nothing."""

    async def test() -> None:
        fleet, trainer, made, overlap = overlapped(dynamic_sampling=True)
        taking = asyncio.ensure_future(overlap.beside(made.take(7)))
        await settle()
        await fleet.answer([0, 1], at(7))
        await fleet.answer([2], at(7, SAME))
        await fleet.answer([3], failed)
        assert trainer.told == [([0, 1, 2, 3], {0, 1, 2, 3}, 7), ([4], {0, 1, 3, 4}, 7)]
        await fleet.answer([3, 4], at(7))
        assert [g.claim_id for g in (await taking).groups] == [0, 1, 3, 4]
        ending = asyncio.ensure_future(overlap.ended())
        await settle()
        assert not ending.done(), "the trainer still computes prompts"
        for call in trainer.calls:
            call.set_result(None)
        await ending

    run(test)


def test_a_trainer_that_fails_ends_the_wait_for_answers_at_once() -> None:
    async def test() -> None:
        _, trainer, made, overlap = overlapped()
        taking = asyncio.ensure_future(overlap.beside(made.take(7)))
        await settle()
        trainer.calls[0].set_exception(RuntimeError("a rank died"))
        with pytest.raises(RuntimeError, match="a rank died"):
            await taking

    run(test)


def test_engines_that_still_answer_with_the_old_version_are_found_out() -> None:
    async def test() -> None:
        _, trainer, made, overlap = overlapped()
        taking = asyncio.ensure_future(made.take(7))
        await settle()
        trainer.calls[0].set_result(None)
        with pytest.raises(AssertionError, match="engines answer 4 groups with version 7, which is about to end"):
            await overlap.ended()
        taking.cancel()

    run(test)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.max_staleness=1", "run.max_staleness = 1: prompts and answers must be of one weight version"),
        ("trainer.optimizer_steps_per_batch=2", "trainer.optimizer_steps_per_batch = 2"),
        ("trainer.backend=megatron", "trainer.backend = 'megatron', which does not share prompts"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(task: dict[str, Path], tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"run.prefix_overlap does not go with {message}"):
        rl_recipe(task, tmp_path / "run", "run.prefix_overlap=true", override)


def actors_left(deadline_s: float = 10.0) -> list[str]:
    """Trainers and engines under this process, once Ray has had its time to end them."""
    end = time.monotonic() + deadline_s
    while (found := _actors()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _actors() -> list[str]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            found.append(process.cmdline()[0])
        except (psutil.NoSuchProcess, IndexError):
            continue
    return [name for name in found if "TrainerRank" in name or "RolloutActor" in name]
