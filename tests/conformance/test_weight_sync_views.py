"""Weights that lie in memory once: engines read the trainer's own, see every step at once, and never answer with weights that have moved."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from miles.data.types import Sample, Status
from tests.weight_sync.cast import Cast, publish
from tests.weight_sync.parts import export_shas, limit_file_size
from trainer.fsdp.backend import FSDPBackend
from weight_sync.gather import export_specs
from weight_sync.transaction import UpdateAborted


def sft_step(backend: FSDPBackend, rank: int, seed: int) -> None:
    """A real optimizer step, on tokens of its own."""
    tokens = np.random.default_rng(seed).integers(3, 40, 24)
    sample = Sample(
        sample_id="0",
        group_id="0",
        tokens=tokens,
        prompt_length=4,
        loss_mask=np.ones(20, bool),
        logprobs=np.zeros(20, np.float32),
        weight_versions=np.zeros(20, np.int32),
        status=Status.COMPLETED,
    )
    backend.step_sft([sample])


def save(backend: FSDPBackend, rank: int, folder: str) -> None:
    backend.save(Path(folder) / "step_00000001", {}, asynchronous=False)


def load(backend: FSDPBackend, rank: int, folder: str) -> None:
    backend.load(Path(folder) / "step_00000001")


def train(cast: Cast, seed: int) -> dict[str, str]:
    asyncio.run(cast.trainer.run_on_ranks(sft_step, seed))
    return asyncio.run(cast.trainer.run_on_ranks(export_shas, "float32"))[0]


LAYOUTS = {
    "1": {"world": 1},
    "2": {"world": 2},
    "2 tensor": {"world": 2, "tensor_parallel": 2},
    "4": {"world": 4},
    "2 shards x 2 tensor": {"world": 4, "tensor_parallel": 2},
    "2 replicas": {"world": 2, "replicas": 2},
}
IN_THE_GATE = ("1", "2", "2 tensor")


@pytest.fixture(scope="module", params=[name if name in IN_THE_GATE else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cast(layout: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    """Trainer ranks in that layout, two engines."""
    made = Cast(tiny_model, tmp_path_factory.mktemp("cast"), engines=2, **LAYOUTS[layout])  # type: ignore[arg-type]
    yield made
    made.close()


def copied(layout: str, cast: Cast) -> int:
    """Bytes of what two ranks have both, or have columns of: it cannot be viewed."""
    if layout in ("1", "2", "4"):
        return 0
    specs = asyncio.run(cast.trainer.run_on_ranks(export_specs))[0]
    rows_alone = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") if "tensor" in layout else ()
    return sum(4 * spec.numel for spec in specs if not any(name in spec.name for name in rows_alone))


def test_engines_hold_the_export_and_what_is_viewed_was_not_sent(layout: str, cast: Cast, tmp_path: Path) -> None:
    exported = train(cast, 0)
    version = cast.next_version()
    result = publish(cast.sync(tmp_path / "journal", "views", verify="always"), version)
    assert cast.held() == {0: exported, 1: exported}
    assert result.digests_compared == 2 * (len(exported) - 1)  # tied embeddings once
    assert result.bytes == copied(layout, cast)
    assert cast.generating() == {0: version, 1: version}


def test_engines_see_a_step_at_once_and_answer_after_its_publication_alone(layout: str, cast: Cast, tmp_path: Path) -> None:
    version = cast.next_version()
    publish(cast.sync(tmp_path / "journal", "views"), version)
    exported = train(cast, 1)
    assert (cast.held() == {0: exported, 1: exported}) == (not copied(layout, cast))
    assert set(cast.versions().values()) == {version}
    with pytest.raises(Exception, match="the trainer's weights have moved"):
        cast.engines.processes[0].call("generate_some")
    cast.replace(0)
    publish(cast.sync(tmp_path / "journal", "views"), version + 1)
    assert cast.generating() == {0: version + 1, 1: version + 1}


def test_an_answer_that_runs_while_the_weights_move_is_never_given(cast: Cast, tmp_path: Path) -> None:
    publish(cast.sync(tmp_path / "journal", "views"), cast.next_version())

    async def both() -> BaseException | None:
        engine = cast.engines
        for _ in range(20):
            answer = asyncio.ensure_future(engine.call(0, "generate_long"))
            await engine.call(0, "wait_until_generating")
            await engine.call(0, "pause", "in_place")  # an answer takes less time than a step: it must not end before that
            if (await engine.call(0, "health")).running:
                break
            await engine.call(0, "resume")
            await answer
        await cast.trainer.run_on_ranks(sft_step, 2)
        await engine.call(0, "resume")
        return (await asyncio.gather(answer, return_exceptions=True))[0]

    assert "the trainer's weights have moved" in str(asyncio.run(both()))
    cast.replace(0)
    publish(cast.sync(tmp_path / "journal", "views"), cast.next_version())


def test_an_update_that_is_aborted_leaves_no_engine_that_answers(cast: Cast, tmp_path: Path) -> None:
    """There is no version to go back to."""
    version = cast.next_version()
    publish(cast.sync(tmp_path / "journal", "views"), version)
    train(cast, 3)
    cast.engines.processes[1].arm("weights_receive", "kill", 1)
    with pytest.raises(UpdateAborted, match="engine 1 failed"):
        publish(cast.sync(tmp_path / "journal", "views"), version + 1)
    with pytest.raises(Exception, match="the trainer's weights have moved"):
        cast.engines.processes[0].call("generate_some")
    for engine in (0, 1):
        cast.replace(engine)
    publish(cast.sync(tmp_path / "journal", "views"), version + 1)
    assert cast.generating() == {0: version + 1, 1: version + 1}


def test_other_transports_leave_the_trainers_weights_alone(cast: Cast, tmp_path: Path) -> None:
    """An engine that served from them takes a copy of its own."""
    publish(cast.sync(tmp_path / "journal", "views"), cast.next_version())
    before = asyncio.run(cast.trainer.run_on_ranks(export_shas, "float32"))[0]
    publish(cast.sync(tmp_path / "journal", "broadcast", bucket_mb=0.01), cast.next_version())
    after = train(cast, 4)
    assert cast.held() == {0: before, 1: before}
    assert before.keys() == after.keys()
    assert before != after


def test_weights_that_moved_into_shared_memory_train_to_the_same_bits(layout: str, tiny_model: Path, tmp_path: Path) -> None:
    here, there = (Cast(tiny_model, folder, engines=1, **LAYOUTS[layout]) for folder in (_made(tmp_path / "here"), _made(tmp_path / "there")))  # type: ignore[arg-type]
    try:
        train(here, 5)
        train(there, 5)
        publish(here.sync(tmp_path / "journal", "views"), 1)
        for seed in (6, 7):
            assert train(here, seed) == train(there, seed)
        exported = train(here, 8)
        asyncio.run(here.trainer.run_on_ranks(save, str(tmp_path / "checkpoints")))
        asyncio.run(there.trainer.run_on_ranks(load, str(tmp_path / "checkpoints")))
        assert asyncio.run(there.trainer.run_on_ranks(export_shas, "float32"))[0] == exported
    finally:
        here.close()
        there.close()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_too_little_room_is_said_and_leaves_nothing_open(tiny_model: Path, tmp_path: Path) -> None:
    cast = Cast(tiny_model, tmp_path, world=1, engines=1)
    try:
        asyncio.run(cast.trainer.run_on_ranks(limit_file_size, 10_000))
        before = asyncio.run(cast.trainer.run_on_ranks(open_files))[0]
        with pytest.raises(UpdateAborted, match=r"make_home: weight_sync.transport = 'views' cannot reserve \d+ bytes of shared memory"):
            publish(cast.sync(tmp_path / "journal", "views"), 1)
        assert asyncio.run(cast.trainer.run_on_ranks(open_files))[0] == before
    finally:
        cast.close()


def open_files(backend: FSDPBackend, rank: int) -> int:
    return sum("miles-weights" in os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
