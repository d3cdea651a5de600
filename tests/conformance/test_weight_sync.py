"""Every transport from the real FSDP trainer into engines, all in processes of their own: what arrives is what was exported."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.weight_sync.cast import Cast, files_of, publish
from tests.weight_sync.parts import scores
from tests.weight_sync.processes import EngineProcesses, Process
from weight_sync.buckets import plan
from weight_sync.contracts import Manifest, TensorSpec, WeightSyncError
from weight_sync.gather import export_specs
from weight_sync.transaction import WeightSync

TRANSPORTS = ["tensor", "broadcast", "p2p", "delta"]


@pytest.fixture(autouse=True)
def no_file_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert files_of(tmp_path / "journal") == []


@pytest.fixture(scope="module")
def cast(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    """Two trainer ranks, two engines."""
    made = Cast(tiny_model, tmp_path_factory.mktemp("cast"), world=2, engines=2)
    yield made
    made.close()


@pytest.mark.parametrize("transport", [*TRANSPORTS, "views"])
def test_engines_answer_with_the_new_weights(cast: Cast, tmp_path: Path, transport: str) -> None:
    """Not only hold them: an engine computes with copies of some, and with products of several."""
    cast.train()
    publish(cast.sync(tmp_path / "journal", transport), cast.next_version())
    for engine in cast.engines.processes.values():
        tokens, logprobs = engine.call("answer")
        assert logprobs == pytest.approx(asyncio.run(cast.trainer.run_on_ranks(scores, tokens))[0], abs=1e-5)


def specs(cast: Cast) -> list[TensorSpec]:
    return list(asyncio.run(cast.trainer.run_on_ranks(export_specs))[0])


@pytest.mark.parametrize("bucket_mb", [0.01, 0.1, 64])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_engine_holds_the_export_bit_for_bit(cast: Cast, tmp_path: Path, transport: str, bucket_mb: float) -> None:
    exported = cast.train()
    publish(cast.sync(tmp_path / "journal", transport, bucket_mb=bucket_mb), cast.next_version())
    assert cast.held() == {0: exported, 1: exported}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engines_generate_at_the_new_version(cast: Cast, tmp_path: Path, transport: str) -> None:
    version = cast.next_version()
    publish(cast.sync(tmp_path / "journal", transport), version)
    assert cast.generating() == {0: version, 1: version}


class Watching(EngineProcesses):
    """Notes how many bucket files lie in shared memory while an engine takes one."""

    def __init__(self, engines: EngineProcesses, journal: Path) -> None:
        super().__init__(engines.processes)
        self._journal = journal
        self.most = 0

    async def call(self, engine_id: int, method: str, *args: Any) -> Any:
        result = await super().call(engine_id, method, *args)
        self.most = max(self.most, len(files_of(self._journal)))
        return result


def test_at_most_two_buckets_have_a_name_in_shared_memory(cast: Cast, tmp_path: Path) -> None:
    watching = Watching(cast.engines, tmp_path / "journal")
    publish(WeightSync(cast.config("tensor", bucket_mb=0.02), tmp_path / "journal", cast.trainer, watching), cast.next_version())
    assert 1 <= watching.most <= 2


def test_by_p2p_each_engine_reads_each_byte_once(cast: Cast, tmp_path: Path) -> None:
    before = [engine.call("bytes_read") for engine in cast.engines.processes.values()]
    publish(cast.sync(tmp_path / "journal", "p2p"), cast.next_version())
    after = [engine.call("bytes_read") for engine in cast.engines.processes.values()]
    size = 4 * sum(spec.numel for spec in specs(cast))
    assert [one - other for one, other in zip(after, before, strict=True)] == [size, size]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_an_answer_that_runs_during_an_update_says_which_tokens_are_new(cast: Cast, tmp_path: Path, mode: str) -> None:
    version = cast.next_version()
    publish(cast.sync(tmp_path / "journal", "tensor"), version)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(cast.engines.processes[0].call, "generate_long")
        cast.engines.processes[0].call("wait_until_generating")
        publish(cast.sync(tmp_path / "journal", "tensor", pause=mode), version + 1)
        finish, versions = running.result(60)
    assert versions == sorted(versions)
    assert set(versions) <= {version, version + 1}
    assert finish == ("abort" if mode == "abort" else "length")
    assert (versions[-1] == version) == (mode == "abort")


@pytest.mark.parametrize(
    ("world", "engines", "dtype"),
    [
        (1, 1, "bfloat16"),
        pytest.param(1, 2, "float32", marks=pytest.mark.full),
        pytest.param(2, 1, "bfloat16", marks=pytest.mark.full),
        pytest.param(4, 2, "float32", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_any_number_of_ranks_and_engines(tiny_model: Path, tmp_path: Path, transport: str, world: int, engines: int, dtype: str) -> None:
    cast = Cast(tiny_model, tmp_path, world=world, engines=engines, dtype=dtype)
    try:
        exported = cast.train()
        publish(cast.sync(tmp_path / "journal", transport), 1)
        assert cast.held() == dict.fromkeys(range(engines), exported)
    finally:
        cast.close()


def test_tied_embeddings_travel_once(cast: Cast) -> None:
    names = [spec.name for spec in specs(cast)]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.parametrize(("verify", "compared"), [("first", [True, False]), ("always", [True, True]), ("never", [False, False])])
def test_digests_are_compared_when_the_recipe_says_so(cast: Cast, tmp_path: Path, verify: str, compared: list[bool]) -> None:
    tensors = len(specs(cast))

    async def run() -> list[int]:
        sync = cast.sync(tmp_path / "journal", "tensor", verify=verify)
        first = cast.next_version()
        counts = [(await sync.publish(version)).digests_compared for version in (first, first + 1)]
        await sync.close()
        return counts

    assert asyncio.run(run()) == [2 * tensors * yes for yes in compared]


def changed(manifest: Manifest, target: str, **change: object) -> Manifest:
    buckets = tuple(replace(b, tensors=tuple(replace(t, **change) if t.name == target else t for t in b.tensors)) for b in manifest.buckets)  # type: ignore[arg-type]
    return replace(manifest, buckets=buckets)


def without(manifest: Manifest, name: str) -> Manifest:
    buckets = tuple(replace(b, tensors=tuple(t for t in b.tensors if t.name != name)) for b in manifest.buckets)
    return replace(manifest, buckets=tuple(b for b in buckets if b.tensors))


WRONG = {
    "shape": lambda m: changed(m, "model.norm.weight", shape=(65,)),
    "dtype": lambda m: changed(m, "model.norm.weight", dtype="float16"),
    "extra": lambda m: changed(m, "model.norm.weight", name="model.norm.weights"),
    "missing": lambda m: without(m, "model.norm.weight"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_an_engine_refuses_a_manifest_that_is_not_its_model_by_name(cast: Cast, fault: str) -> None:
    engine = cast.engines.processes[0]
    manifest = WRONG[fault](plan(cast.next_version(), specs(cast), 64))
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
        engine.call("weights_begin", manifest)
    engine.call("weights_abort")
    assert cast.generating() == cast.versions()


def test_an_engine_does_not_commit_what_it_did_not_receive(cast: Cast) -> None:
    engine: Process = cast.engines.processes[0]
    version = cast.next_version()
    with pytest.raises(WeightSyncError, match=str(version)):
        engine.call("weights_commit", version)
    assert cast.generating() == cast.versions()


@pytest.mark.parametrize("step", [0, -1])
def test_a_version_that_is_not_newer_is_refused_and_nothing_is_touched(cast: Cast, tmp_path: Path, step: int) -> None:
    version = cast.next_version()
    publish(cast.sync(tmp_path / "journal", "tensor"), version)
    before = cast.held()
    cast.train()
    with pytest.raises(WeightSyncError, match=f"version {version + step} is not newer than version {version}"):
        publish(cast.sync(tmp_path / "journal", "tensor"), version + step)
    assert cast.held() == before
