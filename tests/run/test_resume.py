"""What a resumed run records first."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles.core.checkpoint.store import MANIFEST, CheckpointStore
from miles.run.resume import first_step


def test_records_go_on_behind_the_last_complete_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (10, 20):
        store.begin(step).mkdir()
    (store.begin(10) / MANIFEST).touch()
    assert first_step(store, resume=True) == 11


def test_a_new_run_begins_anew_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert first_step(CheckpointStore(tmp_path), resume=False) is None
    assert not caplog.records


def test_a_resumed_run_without_a_checkpoint_says_that_it_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert first_step(CheckpointStore(tmp_path / "checkpoints"), resume=True) is None
    assert f"no complete checkpoint in {tmp_path / 'checkpoints'}, so the run begins anew" in caplog.text
