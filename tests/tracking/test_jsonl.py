"""The JSONL file survives a full disk, a killed process and a resume."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

from miles.tracking.jsonl import JsonlFile, read_metrics, read_records


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_record_is_on_disk_when_write_returns(tmp_path):
    file = JsonlFile(tmp_path / "m.jsonl", None)
    file.write({"step": 0, "a": 1.5})
    assert lines(tmp_path / "m.jsonl") == [{"step": 0, "a": 1.5}]


def test_a_new_run_starts_an_empty_file(tmp_path):
    JsonlFile(tmp_path / "m.jsonl", None).write({"step": 0})
    JsonlFile(tmp_path / "m.jsonl", None)
    assert lines(tmp_path / "m.jsonl") == []


def test_a_resume_cuts_the_steps_that_will_be_written_again(tmp_path):
    file = JsonlFile(tmp_path / "m.jsonl", None)
    for step in range(6):
        file.write({"step": step, "a": float(step)})
    resumed = JsonlFile(tmp_path / "m.jsonl", 3)
    for step in range(3, 8):
        resumed.write({"step": step, "a": -float(step)})
    assert [(r["step"], r["a"]) for r in lines(tmp_path / "m.jsonl")] == [(0, 0), (1, 1), (2, 2), (3, -3), (4, -4), (5, -5), (6, -6), (7, -7)]


def test_a_line_cut_short_by_a_killed_process_is_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0, "a": 1.0}\n{"step": 1, "a"', encoding="utf-8")
    JsonlFile(path, 5).write({"step": 5, "a": 2.0})
    assert [r["step"] for r in lines(path)] == [0, 5]


def test_numbers_that_are_not_finite_are_plain_json_and_come_back(tmp_path):
    file = JsonlFile(tmp_path / "m.jsonl", None)
    file.write({"step": 0, "a": math.nan, "b": -math.inf})
    strict = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=lambda name: 1 / 0)
    (record,) = read_records(tmp_path / "m.jsonl")
    assert strict == {"step": 0, "a": "NaN", "b": "-Infinity"}
    assert math.isnan(record["a"])
    assert record["b"] == -math.inf


def test_metrics_are_read_by_name_with_the_later_record_of_a_step(tmp_path):
    file = JsonlFile(tmp_path / "m.jsonl", None)
    file.write({"step": 1, "time": 3.0, "a": 1.0})
    file.write({"step": 1, "time": 4.0, "a": 2.0, "b": 5.0})
    file.write({"step": 2, "time": 5.0, "a": 3.0})
    assert read_metrics(tmp_path / "m.jsonl") == {"a": ([1, 2], [2.0, 3.0]), "b": ([1], [5.0])}


FULL_DISK = """
import resource, sys
from pathlib import Path
from miles.tracking.config import TrackingConfig
from miles.tracking.tracker import Tracker

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

tracker = Tracker(TrackingConfig(), Path(sys.argv[1]), {}, None)
tracker.log(0, {"reward/mean": 0.0})
limit((Path(sys.argv[1]) / "metrics.jsonl").stat().st_size + 7)  # the next write fails after seven bytes, as on a full disk
tracker.log(1, {"reward/mean": 1.0})
tracker.log(2, {"reward/mean": 2.0})
limit(resource.RLIM_INFINITY)
tracker.log(3, {"reward/mean": 3.0})
tracker.close()
"""


def test_a_full_disk_is_said_once_and_loses_nothing_once_there_is_room(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True)
    assert [(r["step"], r["reward/mean"]) for r in lines(tmp_path / "metrics.jsonl")] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    assert done.stderr.count("cannot write metrics.jsonl") == 1
