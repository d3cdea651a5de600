"""Real W&B runs: offline ones are read back from their record files, online ones meet servers that are not there."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

KEY = "0123456789abcdef0123456789abcdef01234567"

RUN = """
import json, logging, sys
from pathlib import Path
from miles.tracking import wandb_sink
from miles.tracking.config import TrackingConfig
from miles.tracking.tracker import Tracker

folder, mode, first, last, resume = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5])
wandb_sink.INIT_SECONDS = 2.0
config = {"rollout": {"max_new_tokens": 8, "sglang_args": {"api_key": "hunter2hunter2"}}}
with Tracker(TrackingConfig(wandb=mode), folder, config, resume) as tracker:
    for step in range(first, last):
        tracker.log(step, {"reward/mean": step / 4})
        tracker.log(step, {"eval/greedy": step / 8})
        tracker.table(step, "samples", ["prompt", "response"], [["my key is " + "0123456789abcdef" + "0123456789abcdef01234567", "<b>"]])
"""


def run(folder: Path, mode: str, first: int, last: int, resume: int | None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUN, str(folder), mode, str(first), str(last), json.dumps(resume)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True, env={**os.environ, "WANDB_API_KEY": KEY, **environment})


def records(path: Path) -> Iterator[bytes]:
    """LevelDB log format: 32 KiB blocks of chunks, after W&B's own 7-byte header."""
    blocks = path.read_bytes()
    position, record = 7, b""
    while position < len(blocks):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, size, kind = struct.unpack("<IHB", blocks[position : position + 7])
        record += blocks[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):
            yield record
            record = b""


def history(folder: Path) -> list[tuple[int, dict]]:
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                rows.append((record.history.step.num, values))
    return rows


@pytest.fixture(scope="module")
def resumed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 0 to 5, then a resume at step 3 that goes on to step 7."""
    folder = tmp_path_factory.mktemp("wandb") / "run"
    run(folder, "offline", 0, 6, None)
    run(folder, "offline", 3, 8, 3)
    return folder


def test_an_offline_run_holds_what_was_logged(resumed_run):
    assert [(step, values["reward/mean"], values["eval/greedy"]) for step, values in history(resumed_run)] == [(s, s / 4, s / 8) for s in range(8)]


def test_the_resumed_run_is_the_same_wandb_run(resumed_run):
    names = [path.name.rpartition("-")[2] for path in resumed_run.glob("wandb/offline-run-*")]
    assert len(names) == 2
    assert set(names) == {(resumed_run / "wandb_run_id").read_text().strip()}


def test_the_sample_table_reaches_wandb(resumed_run):
    table = json.loads(next(resumed_run.glob("wandb/offline-run-*/files/media/table/*.json")).read_text())
    assert table["columns"] == ["prompt", "response"]


def test_no_secret_is_in_any_file_of_the_run_folder(resumed_run):
    files = [path for path in resumed_run.rglob("*") if path.is_file()]
    leaks = [str(path) for path in files for secret in (KEY, "hunter2hunter2") if secret.encode() in path.read_bytes()]
    assert leaks == []


def test_the_configuration_is_kept_without_its_secret(resumed_run):
    rollout = json.loads((resumed_run / "config.json").read_text())["rollout"]
    assert rollout == {"max_new_tokens": 8, "sglang_args": {"api_key": "[redacted]"}}


def test_a_server_that_refuses_is_said_once_and_the_process_ends(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    done = run(tmp_path, "online", 0, 3, None, WANDB_BASE_URL=f"http://127.0.0.1:{port}")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6
    assert done.stderr.count("W&B failed") == 1
    assert "Traceback" not in done.stderr
    assert KEY not in done.stdout + done.stderr


def test_a_server_that_never_answers_is_said_once_and_the_process_ends(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = run(tmp_path, "online", 0, 3, None, WANDB_BASE_URL=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6
    assert done.stderr.count("W&B failed") == 1
    assert "Traceback" not in done.stderr
