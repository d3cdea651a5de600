"""One log for every sink: names, secrets, TensorBoard files read back, and sinks that fail."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from miles.tracking.config import TrackingConfig
from miles.tracking.jsonl import read_metrics
from miles.tracking.tracker import Tracker


def tracker(folder: Path, resume_from: int | None = None, config: dict | None = None, **options) -> Tracker:
    return Tracker(TrackingConfig(**options), folder, config or {}, resume_from)


def tensorboard_scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_an_unknown_metric_is_refused_with_the_nearest_name(tmp_path):
    with tracker(tmp_path) as records, pytest.raises(ValueError, match=r"'reward/meen'; did you mean 'reward/mean'"):
        records.log(0, {"reward/meen": 1.0})


def test_an_unknown_table_is_refused_with_the_nearest_name(tmp_path):
    with tracker(tmp_path) as records, pytest.raises(ValueError, match=r"'sample'; did you mean 'samples'"):
        records.table(0, "sample", ["a"], [[1]])


def test_a_row_of_another_length_is_refused(tmp_path):
    with tracker(tmp_path) as records, pytest.raises(ValueError, match="a row has 1 cells, but there are 2 columns"):
        records.table(0, "samples", ["a", "b"], [[1]])


def test_tensorboard_files_hold_what_was_logged(tmp_path):
    with tracker(tmp_path, tensorboard=True) as records:
        for step in range(3):
            records.log(step, {"reward/mean": step / 4})
    assert tensorboard_scalars(tmp_path, "reward/mean") == [(0, 0.0), (1, 0.25), (2, 0.5)]


def test_tensorboards_axis_has_neither_gaps_nor_doubles_after_a_resume(tmp_path):
    with tracker(tmp_path, tensorboard=True) as records:
        for step in range(6):
            records.log(step, {"reward/mean": float(step)})
    with tracker(tmp_path, resume_from=3, tensorboard=True) as records:
        for step in range(3, 8):
            records.log(step, {"reward/mean": -float(step)})
    assert tensorboard_scalars(tmp_path, "reward/mean") == [(0, 0), (1, 1), (2, 2), (3, -3), (4, -4), (5, -5), (6, -6), (7, -7)]


def test_tables_are_cut_on_resume_like_metrics(tmp_path):
    for resume_from, steps in ((None, range(4)), (2, range(2, 5))):
        with tracker(tmp_path, resume_from=resume_from) as records:
            for step in steps:
                records.table(step, "samples", ["a"], [[step]])
    assert [json.loads(line)["step"] for line in (tmp_path / "tables.jsonl").read_text().splitlines()] == [0, 1, 2, 3, 4]


def test_a_missing_key_is_said_once_and_records_go_on(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-such-netrc"))
    with caplog.at_level(logging.WARNING), tracker(tmp_path, wandb="online") as records:
        for step in range(3):
            records.log(step, {"reward/mean": 1.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert [message for message in caplog.messages if "WANDB_API_KEY" in message] == caplog.messages
    assert len(caplog.messages) == 1


def test_a_sink_that_cannot_start_is_named_once_and_left_out(tmp_path, caplog):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING), tracker(tmp_path, tensorboard=True) as records:
        for step in range(3):
            records.log(step, {"reward/mean": 1.0})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert [message.partition(" failed")[0] for message in caplog.messages] == ["tracking: TensorBoard"]


class _Fails:
    """A sink whose server goes away in the middle of a run."""

    def log(self, step, metrics):
        raise ConnectionError("the server went away")

    def table(self, step, name, columns, rows):
        raise ConnectionError("the server went away")

    def close(self):
        raise ConnectionError("the server went away")


def test_a_sink_that_fails_in_the_middle_is_named_once_and_the_others_go_on(tmp_path, caplog):
    with tracker(tmp_path) as records:
        records._sinks = {"broken": _Fails(), **records._sinks}
        for step in (1, 2):
            records.log(step, {"reward/mean": 0.5})
    assert [message for message in caplog.messages if "went away" in message] == [
        "tracking: broken failed and is left out from here on; training goes on: the server went away"
    ]
    assert read_metrics(tmp_path / "metrics.jsonl")["reward/mean"] == ([1, 2], [0.5, 0.5])
