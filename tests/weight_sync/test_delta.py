"""The delta transport's own promises, from the real trainer into torch engines in processes of their own. What every transport
promises is in tests/conformance/test_weight_sync*.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.weight_sync.cast import Cast, publish
from weight_sync.contracts import WeightSyncError
from weight_sync.transports.delta_store import WeightStore


@pytest.fixture(scope="module")
def cast(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    """One bfloat16 rank, two engines."""
    made = Cast(tiny_model, tmp_path_factory.mktemp("delta"), world=1, engines=2, dtype="bfloat16")
    yield made
    made.close()


def records(journal: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted((journal.parent / "weights").glob("*/manifest.json"))]


def test_a_step_that_changes_few_weights_sends_a_twelfth_of_a_snapshot(cast: Cast, tmp_path: Path) -> None:
    async def run() -> list[int]:
        sync = cast.sync(tmp_path / "journal", "delta")
        sizes = []
        for _ in range(2):
            sizes.append((await sync.publish(cast.next_version())).bytes)
            exported = await cast.nudge(1e-6)
        sizes.append((await sync.publish(cast.next_version())).bytes)
        assert cast.held() == {0: exported, 1: exported}
        await sync.close()
        return sizes

    snapshot, unchanged, small_step = asyncio.run(run())
    assert unchanged < snapshot / 12
    assert 0 < small_step < snapshot / 12


def test_an_engine_that_joins_late_takes_the_snapshot_and_every_change_since(cast: Cast, tmp_path: Path) -> None:
    async def run() -> dict[str, str]:
        sync = cast.sync(tmp_path / "journal", "delta")
        for _ in range(3):
            exported = await cast.nudge(1e-4)
            await sync.publish(cast.next_version())
        cast.replace(1)
        await sync.catch_up(1)
        await sync.close()
        return exported

    exported = asyncio.run(run())
    assert cast.held() == {0: exported, 1: exported}
    assert [record["base"] is None for record in records(tmp_path / "journal")] == [True, False, False, False]


def test_what_an_aborted_update_wrote_is_a_link_like_any_other(cast: Cast, tmp_path: Path) -> None:
    async def run() -> dict[str, str]:
        sync = cast.sync(tmp_path / "journal", "delta")
        await sync.publish(cast.next_version())
        await cast.nudge(1e-4)
        cast.engines.processes[0].arm("weights_receive", "raise", nth=2)
        with pytest.raises(WeightSyncError, match="injected"):
            await sync.publish(cast.next_version())
        exported = await cast.nudge(1e-4)
        await sync.publish(cast.next_version())
        await sync.close()
        return exported

    exported = asyncio.run(run())
    assert cast.held() == {0: exported, 1: exported}
    assert len(records(tmp_path / "journal")) == 3


@pytest.mark.parametrize("damage", ["missing", "another byte"])
def test_where_the_chain_is_broken_a_snapshot_is_written(cast: Cast, tmp_path: Path, damage: str) -> None:
    journal = tmp_path / "journal"

    async def run() -> dict[str, str]:
        sync = cast.sync(journal, "delta")
        for _ in range(2):
            exported = await cast.nudge(1e-4)
            await sync.publish(cast.next_version())
        first = journal.parent / "weights" / "00000001" / "bucket-0"
        content = bytearray(first.read_bytes())
        content[-1] ^= 1
        first.unlink() if damage == "missing" else first.write_bytes(content)
        cast.replace(1)
        await sync.catch_up(1)
        await sync.close()
        return exported

    exported = asyncio.run(run())
    assert cast.held() == {0: exported, 1: exported}
    assert [record["base"] for record in records(journal)] == [None]


def test_a_run_that_goes_on_starts_from_a_snapshot_and_removes_what_was_before(cast: Cast, tmp_path: Path, tiny_model: Path) -> None:
    journal = tmp_path / "journal"
    publish(cast.sync(journal, "delta"), cast.next_version())
    fresh = Cast(tiny_model, tmp_path, world=1, engines=1, dtype="bfloat16")
    try:
        exported = fresh.train()
        publish(fresh.sync(journal, "delta"), cast.next_version())
        assert fresh.held() == {0: exported}
    finally:
        fresh.close()
    assert sorted(path.name for path in (journal.parent / "weights").iterdir()) == ["00000002"]


def test_a_file_system_that_is_not_there_is_named() -> None:
    with pytest.raises(WeightSyncError, match=r"weight_sync\.store = 'nothing://here'"):
        WeightStore("nothing://here")
