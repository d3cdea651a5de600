"""The one loop with everything real: Ray, the torch engine, FSDP2 on gloo, weight sync, checkpoints."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from miles.config import ConfigError
from miles.core.checkpoint.store import CheckpointStore, read_manifest
from miles.run import convert, rl, sft
from miles.run.engines import Staff
from tests.run.runs import learned, make_task, records, rl_overrides, rl_recipe, sft_recipe, weights

pytestmark = pytest.mark.usefixtures("ray_cluster")

EXACT_PPO = ("run.steps=4", "algorithm.advantages=gae", "critic.lr=1e-2", "critic.head_start=1", "model.true_on_policy=true")
KEPT = ("checkpoint.every=1", "checkpoint.keep=9", "checkpoint.export=true")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def whole(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of four steps, two epochs of its data, with batch-invariant operators. It is PPO's, so that a critic is resumed too."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    rl.run(rl_recipe(task, folder, *EXACT_PPO, *KEPT))
    return folder


def test_every_step_is_recorded_on_policy(whole: Path) -> None:
    steps = [r for r in records(whole) if "reward/mean" in r]
    assert [r["version/trained"] for r in steps] == [1, 2, 3, 4]
    assert max(r["staleness/max"] for r in steps) == 0


def test_true_on_policy_is_exactly_zero_at_every_step(whole: Path) -> None:
    """But the first, in which the critic learns alone and the policy scores nothing."""
    assert [r["mismatch/logprob_abs_max"] for r in records(whole)[1:]] == [0.0] * 3


def test_the_policy_learns(whole: Path) -> None:
    rewards = [r["reward/mean"] for r in records(whole)]
    assert rewards[-1] > rewards[0]


def test_a_checkpoint_becomes_the_model_that_the_run_exported(task: dict[str, Path], whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert.run(str(whole / "checkpoints" / "step_00000004"), str(tmp_path / "model"), to="huggingface", model=str(task["model"]), dtype=None, file_gib=1)
    assert weights(tmp_path) == weights(whole)
    assert "version 4 of the run" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--model is missing"):
        convert.run(str(whole / "checkpoints" / "step_00000004"), str(tmp_path / "other"), to="huggingface", model=None, dtype=None, file_gib=1)


def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(task: dict[str, Path], whole: Path, tmp_path: Path) -> None:
    """kill -9 of the whole driver after some step, then --resume: same weights, same metrics, same step axis. The data has two
    batches an epoch, so a run that is killed in the first crosses its end."""
    folder = tmp_path / "run"
    overrides = tmp_path / "overrides.json"
    overrides.write_text(json.dumps(rl_overrides(task, folder, *EXACT_PPO, *KEPT)))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.run.kill_me", str(overrides)],
        start_new_session=True,
        env=os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (folder / "checkpoints" / "step_00000001" / "complete.json").exists():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    rl.run(rl_recipe(task, folder, *EXACT_PPO, *KEPT), resume=True)
    assert weights(folder) == weights(whole)
    assert learned(folder) == learned(whole)


def test_with_extra_prompts_nobody_waits_for_the_slowest_and_its_claim_ends_once(
    task: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = ('reward.functions=[{name="tests.run.runs:never_for_claim_2"}]', "reward.timeout_s=3600", "rollout.timeout_s=3600")
    rl.run(rl_recipe(task, tmp_path / "run", "run.steps=3", "rollout.extra_prompts=1", "rollout.max_attempts=2", "checkpoint.every=3", *slow))
    steps = [r for r in records(tmp_path / "run") if "reward/mean" in r]
    assert [r["groups/trained"] for r in steps] == [4, 4, 4]
    assert sum(r["groups/exhausted"] for r in steps) == 1, "claim 2 was aborted in both its attempts"
    assert max(r["staleness/max"] for r in steps) == 0
    claims = read_manifest(CheckpointStore(tmp_path / "run" / "checkpoints").latest())["extra"]["producer"]["claims"]
    assert claims["ended"] == {"trained": 12, "filtered": 0, "failed": 0, "exhausted": 1}
    assert claims["next"] == 13 + len(claims["open"])
    told = "1 prompts were given up after rollout.max_attempts = 2: of all that ended, 12 trained, 0 filtered, 0 failed, 1 exhausted"
    assert told in caplog.text


@pytest.mark.full
def test_engines_that_only_evaluate_change_nothing_and_one_that_is_killed_costs_its_evaluation_alone(task: dict[str, Path], tmp_path: Path) -> None:
    """Against the same run whose engines evaluate between two steps: with exact operators, the same answers and the same weights."""
    common = ("model.true_on_policy=true", "evaluate.every=2", f'evaluate.data.paths=["{task["test"]}"]', "evaluate.max_new_tokens=6", *KEPT, "cluster.cpus=3")
    killing = f'reward.functions=[{{name="tests.run.runs:kills_who_evaluates_version_2", args={{flag="{tmp_path / "flag"}"}}}}]'
    found = []
    for engines, more in ((0, ()), (1, (killing,))):
        folder = tmp_path / str(engines)
        rl.run(rl_recipe(task, folder, *common, f"evaluate.engines={engines}", *more))
        rows = [r for r in records(folder) if "eval/version" in r]
        assert all(("eval/late" in r) == (engines == 1) for r in rows)
        assert all(r.pop("eval/late", 0.0) == r["step"] - r["eval/version"] for r in rows)
        found.append({r["eval/version"]: {name: value for name, value in r.items() if name.startswith("eval/")} for r in rows})
    assert (tmp_path / "flag").exists()
    assert list(found[0]) == [0, 2, 4]
    assert found[1] == {version: found[0][version] for version in (0, 4)}
    assert weights(tmp_path / "1") == weights(tmp_path / "0")


def test_an_engine_killed_in_the_middle_of_a_rollout_changes_nothing(task: dict[str, Path], whole: Path, tmp_path: Path) -> None:
    """Its groups are generated again by a fresh engine that first took the current weights; with exact operators the run ends with the same bits,
    wherever the weights lie."""
    reward = f'reward.functions=[{{name="tests.run.runs:kills_its_engine_once", args={{flag="{tmp_path / "flag"}"}}}}]'
    rl.run(rl_recipe(task, tmp_path / "run", *EXACT_PPO, "checkpoint.export=true", "weight_sync.transport=views", reward))
    assert sum(r["groups/failed"] for r in records(tmp_path / "run")) > 0
    assert weights(tmp_path / "run") == weights(whole)


@pytest.mark.full
def test_engines_join_and_leave_a_run_and_nobody_can_tell_from_the_weights(
    task: dict[str, Path], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that joins first takes the current weights; with exact operators any number of engines gives the same bits."""
    settle = Staff.settle

    async def patient(staff: Staff) -> None:
        """A step here is over long before an engine is up."""
        if coming := {member.joining for member in staff._fleet._members if member.joining is not None}:
            await asyncio.wait(coming)
        await settle(staff)

    monkeypatch.setattr(Staff, "settle", patient)
    folder = tmp_path / "run"
    reward = f'reward.functions=[{{name="tests.run.runs:asks_for_engines", args={{folder="{folder}"}}}}]'
    rl.run(rl_recipe(task, folder, *EXACT_PPO, "checkpoint.export=true", reward))
    assert [r["engines/up"] for r in records(folder)] == [1, 1, 3, 1]
    assert weights(folder) == weights(whole)


@pytest.mark.full
def test_four_versions_off_with_a_long_tail_trains_nothing_older_and_ends_every_claim_once(task: dict[str, Path], tmp_path: Path) -> None:
    slow = 'reward.functions=[{name="tests.run.runs:after_a_while"}]'
    rl.run(rl_recipe(task, tmp_path / "run", "run.steps=16", "cluster.cpus=3", "run.max_staleness=4", "rollout.engines=2", "checkpoint.every=1", slow))
    steps = records(tmp_path / "run")
    assert [r["version/trained"] for r in steps] == list(range(1, 17))
    assert 1 < max(r["staleness/max"] for r in steps) <= 4
    claims = read_manifest(CheckpointStore(tmp_path / "run" / "checkpoints").latest())["extra"]["producer"]["claims"]
    assert sum(claims["ended"].values()) + len(claims["open"]) == claims["next"]
    assert claims["ended"]["trained"] == 16 * 4


def test_supervised_fine_tuning_learns_and_resumes(task: dict[str, Path], tmp_path: Path) -> None:
    sft.run(sft_recipe(task, tmp_path / "whole", "checkpoint.every=2"))
    shutil.copytree(tmp_path / "whole", tmp_path / "half", ignore=shutil.ignore_patterns("step_00000004", "model"))
    sft.run(sft_recipe(task, tmp_path / "half", "checkpoint.every=2"), resume=True)
    losses = [r["loss/nll"] for r in records(tmp_path / "whole")]
    assert losses[-1] < losses[0]
    assert weights(tmp_path / "half") == weights(tmp_path / "whole")
