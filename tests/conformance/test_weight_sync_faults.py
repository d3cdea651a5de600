"""Weight updates that fail: at every stage, by an exception and by SIGKILL, every living engine serves the journal's version."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.forks import CONTEXT
from tests.weight_sync.cast import Cast, files_of, publish
from tests.weight_sync.parts import die_at_tensor, limit_file_size, move_weights, process_id
from tests.weight_sync.processes import DEADLINE_S, EngineProcesses, TrainerProcesses
from weight_sync.contracts import SharedMemory, WeightSyncError
from weight_sync.journal import Journal
from weight_sync.transaction import UpdateAborted, WeightSync

TRANSPORTS = ["tensor", "broadcast", "p2p", "delta"]
BEFORE_THE_JOURNAL = ["pause", "weights_begin", "weights_receive", "weights_prepared"]


@pytest.fixture(autouse=True)
def no_file_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert files_of(tmp_path / "journal") == []


@pytest.fixture(scope="module")
def shared_cast(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    made = Cast(tiny_model, tmp_path_factory.mktemp("faults"), world=2, engines=2)
    yield made
    made.close()


@pytest.fixture
def cast(shared_cast: Cast) -> Iterator[Cast]:
    """Two ranks and two living engines; what a test broke is mended after it."""
    yield shared_cast
    shared_cast.mend()


def served(journal: Path) -> int | None:
    opened = Journal(journal)
    opened.close()
    return opened.last.version if opened.last else None


def check_all_serve_the_journals_version(cast: Cast, journal: Path) -> None:
    version = served(journal)
    assert cast.versions() == cast.generating() == dict.fromkeys(cast.living(), version)


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("stage", BEFORE_THE_JOURNAL)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_fails_before_the_journal_leaves_all_on_the_old_weights(cast: Cast, tmp_path: Path, transport: str, stage: str, how: str) -> None:
    journal, version = tmp_path / "journal", cast.next_version()
    exported = cast.train()
    publish(cast.sync(journal, transport), version)
    cast.train()
    # The second bucket, so that the failure comes in the middle of the bytes.
    cast.engines.processes[1].arm(stage, how, nth=2 if stage == "weights_receive" else 1)
    with pytest.raises(UpdateAborted, match=f"from version {version} to {version + 1}: engine 1 failed at {stage}") as caught:
        publish(cast.sync(journal, transport), version + 1)
    assert set(caught.value.dead) == ({1} if how == "kill" else set())
    check_all_serve_the_journals_version(cast, journal)
    assert cast.held() == dict.fromkeys(cast.living(), exported)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_after_an_aborted_update_the_same_objects_publish_again(cast: Cast, tmp_path: Path, transport: str) -> None:
    exported = cast.train()

    async def run() -> None:
        sync = cast.sync(tmp_path / "journal", transport)
        version = cast.next_version()
        cast.engines.processes[0].arm("weights_receive", "raise", nth=2)
        with pytest.raises(UpdateAborted):
            await sync.publish(version)
        await sync.publish(version)
        await sync.close()

    asyncio.run(run())
    assert cast.held() == {0: exported, 1: exported}


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_fails_to_commit_is_dead_and_the_others_go_on(cast: Cast, tmp_path: Path, transport: str, how: str) -> None:
    journal, version = tmp_path / "journal", cast.next_version()
    exported = cast.train()
    cast.engines.processes[1].arm("weights_commit", how)
    result = publish(cast.sync(journal, transport), version)
    cast.engines.processes[1].kill()
    assert list(result.dead) == [1]
    assert cast.held() == {0: exported}
    check_all_serve_the_journals_version(cast, journal)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_replaced_engine_catches_up_with_the_journals_version(cast: Cast, tmp_path: Path, transport: str) -> None:
    journal, version = tmp_path / "journal", cast.next_version()
    exported = cast.train()

    async def run() -> None:
        sync = cast.sync(journal, transport)
        cast.engines.processes[1].arm("weights_commit", "kill")
        await sync.publish(version)
        cast.replace(1)
        result = await sync.catch_up(1)
        assert result.digests_compared > 0
        await sync.publish(version + 1)
        await sync.close()

    asyncio.run(run())
    assert cast.held() == {0: exported, 1: exported}
    check_all_serve_the_journals_version(cast, journal)


def test_an_engine_cannot_catch_up_when_the_trainer_has_moved_on(cast: Cast, tmp_path: Path) -> None:
    version = cast.next_version()

    async def run() -> None:
        sync = cast.sync(tmp_path / "journal", "tensor")
        await sync.publish(version)
        cast.replace(1)
        await cast.trainer.run_on_ranks(move_weights, 0.99)
        with pytest.raises(UpdateAborted, match=f"no longer those published as version {version}"):
            await sync.catch_up(1)
        await sync.close()

    asyncio.run(run())
    assert cast.versions()[1] == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_hangs_ends_the_update_at_the_deadline(cast: Cast, tmp_path: Path, transport: str) -> None:
    journal, version = tmp_path / "journal", cast.next_version()
    publish(cast.sync(journal, transport), version)
    cast.engines.processes[0].arm("weights_receive", "hang", nth=2)
    with pytest.raises(UpdateAborted, match=r"no answer in time|furthest behind was engine 0 with 1 of"):
        publish(cast.sync(journal, transport, timeout_s=1.0), version + 1)
    check_all_serve_the_journals_version(cast, journal)
    cast.replace(0)


class OneBitFlipped(EngineProcesses):
    """Passes everything on, but flips one bit of the last bucket's file on its way to engine 1."""

    async def call(self, engine_id: int, method: str, *args: Any) -> Any:
        if method == "weights_receive" and engine_id == 1:
            bucket, payload = args
            spoilt = Path(payload.path + "-spoilt")
            content = bytearray(Path(payload.path).read_bytes())
            content[-1] ^= 1
            spoilt.write_bytes(content)
            args = (bucket, SharedMemory(str(spoilt), payload.nbytes))
        return await super().call(engine_id, method, *args)


def test_one_flipped_bit_is_found_and_named(cast: Cast, tmp_path: Path) -> None:
    journal, version = tmp_path / "journal", cast.next_version()
    publish(cast.sync(journal, "tensor"), version)
    before = cast.held()
    cast.train()
    spoilt = OneBitFlipped(cast.engines.processes)
    with pytest.raises(UpdateAborted, match=r"engine 1 holds other bytes of tensor 'model\.\S+'"):
        publish(WeightSync(cast.config("tensor"), journal, cast.trainer, spoilt), version + 1)
    assert cast.held() == before
    check_all_serve_the_journals_version(cast, journal)


def test_a_full_shared_memory_file_system_is_named_and_the_trainer_lives(tiny_model: Path, tmp_path: Path) -> None:
    cast = Cast(tiny_model, tmp_path, world=2, engines=1)
    try:
        publish(cast.sync(tmp_path / "journal", "tensor"), 1)
        before = cast.held()
        asyncio.run(cast.trainer.run_on_ranks(limit_file_size, 10_000))
        with pytest.raises(UpdateAborted, match="write_bucket: bucket 0: cannot reserve"):
            publish(cast.sync(tmp_path / "journal", "tensor"), 2)
        assert cast.held() == before
        check_all_serve_the_journals_version(cast, tmp_path / "journal")
        publish(cast.sync(tmp_path / "journal", "broadcast"), 2)
    finally:
        cast.close()


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_trainer_rank_that_dies_while_it_gathers_leaves_engines_on_the_old_weights(tiny_model: Path, tmp_path: Path, transport: str, rank: int) -> None:
    cast = Cast(tiny_model, tmp_path, world=2, engines=2)
    try:
        journal = tmp_path / "journal"
        exported = cast.train()
        publish(cast.sync(journal, transport), 1)
        cast.train()
        asyncio.run(cast.trainer.run_on_ranks(die_at_tensor, rank, 12))
        with pytest.raises(UpdateAborted, match=r"the trainer failed at|a member left"):
            publish(cast.sync(journal, transport, timeout_s=5.0), 2)
        assert cast.held() == {0: exported, 1: exported}
        check_all_serve_the_journals_version(cast, journal)
    finally:
        cast.close()


class Signalling(EngineProcesses):
    """Sends a trainer rank a signal before an engine takes its second bucket."""

    def __init__(self, engines: EngineProcesses, pid: int, number: signal.Signals) -> None:
        super().__init__(engines.processes)
        self._pid, self._number, self._calls = pid, number, 0

    async def call(self, engine_id: int, method: str, *args: Any) -> Any:
        if method == "weights_receive":
            self._calls += 1
            if self._calls == 2:
                os.kill(self._pid, self._number)
        return await super().call(engine_id, method, *args)


@pytest.mark.parametrize(
    ("number", "timeout_s", "what"), [(signal.SIGKILL, 20.0, "is gone|failed"), pytest.param(signal.SIGSTOP, 5.0, "no answer in time", marks=pytest.mark.full)]
)
def test_a_trainer_rank_that_dies_or_hangs_while_engines_read_from_it_leaves_them_on_the_old_weights(
    tiny_model: Path, tmp_path: Path, number: signal.Signals, timeout_s: float, what: str
) -> None:
    cast = Cast(tiny_model, tmp_path, world=2, engines=1)
    try:
        journal = tmp_path / "journal"
        exported = cast.train()
        publish(cast.sync(journal, "p2p"), 1)
        pid = asyncio.run(cast.trainer.run_on_ranks(process_id))[1]
        cast.train()
        engines = Signalling(cast.engines, pid, number)
        with pytest.raises(UpdateAborted, match=f"engine 0 failed at weights_receive: .*({what})"):
            publish(WeightSync(cast.config("p2p", timeout_s=timeout_s, verify="never"), journal, cast.trainer, engines), 2)
        assert cast.held() == {0: exported}
        check_all_serve_the_journals_version(cast, journal)
    finally:
        cast.close()


class DyingEngines(EngineProcesses):
    """Kills this process, the driver, before the first call of `method`."""

    def __init__(self, addresses: dict[int, str], method: str) -> None:
        super().__init__(addresses)
        self._method = method

    async def call(self, engine_id: int, method: str, *args: Any) -> Any:
        if method == self._method and engine_id == 1:
            await asyncio.sleep(0.2)  # engine 0 may be through already
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().call(engine_id, method, *args)


def drive_and_die(ranks: list[str], engines: dict[int, str], journal: Path, transport: str, version: int, method: str) -> None:
    publish(WeightSync(Cast.config(transport), journal, TrainerProcesses(ranks), DyingEngines(engines, method)), version)


@pytest.mark.parametrize(("method", "advanced"), [("weights_receive", 0), ("weights_prepared", 0), ("weights_commit", 1)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_journal_of_a_driver_that_was_killed_says_which_version_counts(cast: Cast, tmp_path: Path, transport: str, method: str, advanced: int) -> None:
    """Engines are the driver's and go with it. Fresh ones catch up with the journal's version where the trainer still has it."""
    journal, version = tmp_path / "journal", cast.next_version()
    cast.train()
    publish(cast.sync(journal, transport), version)
    new = cast.train()
    kill_a_driver(cast, journal, transport, version + 1, method)
    for engine_id in (0, 1):
        cast.replace(engine_id)
    assert served(journal) == version + advanced

    async def catch_up() -> None:
        sync = cast.sync(journal, transport)
        try:
            for engine_id in (0, 1):
                await sync.catch_up(engine_id)
        finally:
            await sync.close()

    if advanced:
        asyncio.run(catch_up())
        check_all_serve_the_journals_version(cast, journal)
        assert cast.held() == {0: new, 1: new}
    else:
        with pytest.raises(UpdateAborted, match=f"no longer those published as version {version}"):
            asyncio.run(catch_up())


def kill_a_driver(cast: Cast, journal: Path, transport: str, version: int, method: str) -> None:
    addresses = {i: engine.address for i, engine in cast.engines.processes.items()}
    driver = CONTEXT.Process(target=drive_and_die, args=([r.address for r in cast.ranks], addresses, journal, transport, version, method))
    driver.start()
    driver.join(DEADLINE_S)
    assert driver.exitcode == -signal.SIGKILL


def drive_with_a_full_disk(ranks: list[str], engines: dict[int, str], journal: Path, version: int, answer: Connection) -> None:
    sync = WeightSync(Cast.config("tensor"), journal, TrainerProcesses(ranks), EngineProcesses(engines))
    limit_file_size(None, 0, journal.stat().st_size + 20)  # type: ignore[arg-type]
    try:
        publish(sync, version)
    except UpdateAborted as error:
        answer.send(str(error))


def test_a_journal_that_cannot_be_written_aborts_the_update(cast: Cast, tmp_path: Path) -> None:
    journal, version = tmp_path / "journal", cast.next_version()
    publish(cast.sync(journal, "tensor"), version)
    before = cast.held()
    cast.train()
    addresses = {i: engine.address for i, engine in cast.engines.processes.items()}
    answer, theirs = CONTEXT.Pipe()
    driver = CONTEXT.Process(target=drive_with_a_full_disk, args=([r.address for r in cast.ranks], addresses, journal, version + 1, theirs))
    driver.start()
    assert answer.poll(DEADLINE_S)
    message = answer.recv()
    driver.join(DEADLINE_S)
    assert f"cannot write version {version + 1} to the weight journal" in message
    assert cast.held() == before
    check_all_serve_the_journals_version(cast, journal)


def test_what_an_earlier_driver_left_in_shared_memory_is_removed(cast: Cast, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    kill_a_driver(cast, journal, "tensor", cast.next_version(), "weights_receive")
    assert files_of(journal)
    asyncio.run(cast.sync(journal, "tensor").close())
    assert not files_of(journal)


def test_without_an_engine_nothing_is_published(cast: Cast, tmp_path: Path) -> None:
    sync = WeightSync(cast.config("tensor"), tmp_path / "journal", cast.trainer, EngineProcesses({}))
    with pytest.raises(WeightSyncError, match="no engine is up"):
        publish(sync, 1)


def test_after_a_rewind_versions_count_from_the_checkpoint(cast: Cast, tmp_path: Path) -> None:
    journal, version = tmp_path / "journal", cast.next_version() + 5
    publish(cast.sync(journal, "tensor"), version)
    exported = cast.train()
    cast.replace(0)
    cast.replace(1)

    async def run() -> None:
        sync = cast.sync(journal, "tensor")
        sync.rewind(version - 3)
        await sync.catch_up(0)
        await sync.catch_up(1)
        await sync.close()

    asyncio.run(run())
    assert cast.held() == {0: exported, 1: exported}
    check_all_serve_the_journals_version(cast, journal)
