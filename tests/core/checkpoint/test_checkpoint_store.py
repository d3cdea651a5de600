"""Names, completeness and pruning of checkpoint folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles.core.checkpoint.store import MANIFEST, CheckpointError, CheckpointStore, read_manifest


def _complete(store: CheckpointStore, *steps: int) -> None:
    for step in steps:
        folder = store.begin(step)
        folder.mkdir()
        (folder / MANIFEST).write_text("{}")


def test_a_new_run_has_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "checkpoints").latest() is None


def test_the_latest_is_by_number_and_not_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _complete(store, 9, 100_000_000, 10)
    assert store.latest_step() == 100_000_000


def test_partial_folders_and_folders_without_a_manifest_are_never_the_latest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _complete(store, 1)
    store.begin(2).mkdir()
    partial = store.begin(3).with_name(store.begin(3).name + ".partial")
    partial.mkdir()
    (partial / MANIFEST).write_text("{}")
    assert store.latest_step() == 1


def test_pruning_keeps_the_last_k(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    _complete(store, 5, 10, 15, 20)
    store.prune()
    assert store.complete_steps() == [15, 20]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000015", "step_00000020"]


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    _complete(store, 1)
    (tmp_path / "step_00000002.partial").mkdir()
    (tmp_path / "step_00000003").mkdir()
    (tmp_path / "notes").mkdir()
    store.remove_leftovers()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step_00000001"]


def test_reading_what_is_not_complete_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        read_manifest(tmp_path)
