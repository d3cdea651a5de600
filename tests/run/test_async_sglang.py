"""Asynchronous training with everything real at once: two SGLang engines four versions ahead, one of them killed, the driver killed, and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from miles.core.checkpoint.store import CheckpointStore, read_manifest
from miles.run import rl
from tests.run.runs import make_task, records, rl_overrides, rl_recipe
from tests.run.test_distill_sglang import kill_a_server_once, servers_of

pytestmark = [pytest.mark.full, pytest.mark.sglang, pytest.mark.timeout(600)]

STEPS, PROMPTS = 10, 4
RUN = (
    f"run.steps={STEPS}",
    "run.max_staleness=4",
    "rollout.engine=sglang",
    "rollout.engines=2",
    f"rollout.prompts_per_step={PROMPTS}",
    "cluster.cpus=4",
    "checkpoint.every=1",
    "checkpoint.keep=3",
)


def test_an_engine_and_then_the_driver_are_killed_and_every_claim_of_the_resumed_run_ends_once(tmp_path: Path) -> None:
    task, folder = make_task(tmp_path), tmp_path / "run"
    overrides = tmp_path / "overrides.json"
    overrides.write_text(json.dumps(rl_overrides(task, folder, *RUN)))
    watcher = threading.Thread(target=kill_a_server_once, args=(folder,), daemon=True)
    watcher.start()
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.run.kill_me", str(overrides)],
            start_new_session=True,
            stdout=output,
            stderr=output,
        )
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not (folder / "checkpoints" / "step_00000006" / "complete.json").exists():
            assert process.poll() is None, f"the run ended before it could be killed: {(tmp_path / 'output').read_text()[-3000:]}"
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
    assert not watcher.is_alive(), "an engine was killed before"
    reached = read_manifest(CheckpointStore(folder / "checkpoints").latest())["extra"]["producer"]["claims"]
    assert reached["ended"]["trained"] >= 6 * PROMPTS
    rl.run(rl_recipe(task, folder, *RUN), resume=True)
    steps = [r for r in records(folder) if "reward/mean" in r]
    assert [r["version/trained"] for r in steps] == list(range(1, STEPS + 1))
    assert 0 < max(r["staleness/max"] for r in steps) <= 4
    claims = read_manifest(CheckpointStore(folder / "checkpoints").latest())["extra"]["producer"]["claims"]
    ended = claims["ended"]
    assert ended["trained"] == STEPS * PROMPTS
    assert sum(ended.values()) + len(claims["open"]) == claims["next"]
    assert servers_of(folder) == []
