"""The life and death of the server's process group. One start of its own, since its server is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from miles.core.model.batch_invariant import make_batch_invariant
from miles.core.model.config import ModelConfig
from miles.core.model.load import load_model
from miles.core.model.packed import packed_logprobs
from rollout.config import RolloutConfig
from rollout.engines import sglang_engine
from rollout.engines.contracts import EngineError, Generation, Request
from rollout.engines.sglang_engine import SGLangEngine
from rollout.engines.sglang_launcher import group_members, shared_files
from tests.conformance.engine_bench import FULL, Bench, changed, request

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


def engine_for(model: Path, log_folder: Path, version: int = 0, exact: bool = False, **sglang_args: object) -> SGLangEngine:
    rollout = RolloutConfig(engine="sglang", max_running=8, timeout_s=60, sglang_args=dict(sglang_args))
    return SGLangEngine(ModelConfig(path=str(model), true_on_policy=exact), rollout, log_folder=log_folder, weight_version=version)


@pytest.fixture(scope="module")
def doomed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """A server with batch-invariant operators at weight version 7. The last test with it kills it."""
    engine = engine_for(tiny_model, tmp_path_factory.mktemp("doomed"), 7, exact=True)
    try:
        asyncio.run(engine.start())
        yield engine
    finally:
        asyncio.run(engine.close())


def test_a_seed_gives_the_same_tokens_beside_any_others(doomed: SGLangEngine) -> None:
    alone = asyncio.run(doomed.generate([request(new=32, seed=5)]))[0]
    among = asyncio.run(doomed.generate([request(6 + i, new=32, seed=i) for i in range(4)] + [request(new=32, seed=5)]))[-1]
    other = asyncio.run(doomed.generate([request(new=32, seed=6)]))[0]
    assert alone.tokens.tolist() == among.tokens.tolist() != other.tokens.tolist()


def test_a_seeded_response_that_was_cut_goes_on_with_the_same_tokens(doomed: SGLangEngine) -> None:
    whole = asyncio.run(doomed.generate([request(new=32, seed=5)]))[0].tokens.tolist()
    rest = asyncio.run(doomed.generate([request(new=32, seed=5, generated=whole[:9])]))[0]
    assert rest.tokens.tolist() == whole[9:]


def _trainer_logprobs(folder: Path, requests: list[Request], made: list[Generation]) -> np.ndarray:
    """As a `true_on_policy` trainer scores the same tokens: packed in one row, with its batch-invariant operators."""
    model = load_model(folder)
    make_batch_invariant(model)
    sequences = [torch.tensor(np.concatenate([r.prompt, r.generated, g.tokens])) for r, g in zip(requests, made, strict=True)]
    lengths = torch.tensor([len(s) for s in sequences])
    ends = lengths.cumsum(0).tolist()
    scored = torch.cat([torch.arange(end - len(g.tokens), end) for end, g in zip(ends, made, strict=True)])
    positions = torch.cat([torch.arange(n) for n in lengths])
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    with torch.no_grad():
        return packed_logprobs(model, torch.cat(sequences), positions, rows, scored, requests[0].sampling.temperature, 256)[0].numpy()


def _largest_difference(engine: SGLangEngine, folder: Path, temperature: float) -> float:
    requests = [request(3 + 5 * i, new=40 + i, seed=i, temperature=temperature, start=i // 2) for i in range(8)]
    made = asyncio.run(engine.generate(requests))
    cut = [replace(r, generated=g.tokens[:11]) for r, g in zip(requests[:3], made[:3], strict=True)]
    again = asyncio.run(engine.generate(cut))  # a prefill that ends inside the response, and prefixes found in the cache
    recorded = np.concatenate([g.logprobs for g in made + again])
    return float(np.abs(recorded - _trainer_logprobs(folder, requests + cut, made + again)).max())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_true_on_policy_logprobs_are_the_trainers_bit_for_bit(doomed: SGLangEngine, tiny_model: Path, temperature: float) -> None:
    assert _largest_difference(doomed, tiny_model, temperature) == 0.0


def test_without_the_batch_invariant_operators_they_are_not(sglang_engine: SGLangEngine, tiny_model: Path, tmp_path: Path) -> None:
    Bench(sglang_engine, tiny_model).settle(tmp_path)
    assert 0.0 < _largest_difference(sglang_engine, tiny_model, 1.0) < 2e-5


def test_requests_whose_caller_has_gone_end_when_they_are_aborted(sglang_engine: SGLangEngine, tiny_model: Path, tmp_path: Path) -> None:
    """As those of a group that was aborted, or timed out. The server refuses to drop its cache while it has requests; these have some 200 steps
    left, and it answers once a step at most."""
    bench = Bench(sglang_engine, tiny_model)
    bench.settle(tmp_path)
    crowd = [request(new=FULL, start=i, seed=i, name=f"7/{i}") for i in range(48)]

    async def case() -> list[str] | None:
        (task,) = await bench.under_way(crowd)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            return None  # they were over before they could be given up
        await sglang_engine.abort([r.request_id for r in crowd])
        refused = []
        for _ in range(8):
            try:
                await sglang_engine._call("/flush_cache", {})
            except EngineError as error:
                refused.append(str(error))
            else:
                break
        return refused

    refused = bench.caught(lambda: asyncio.run(case()), lambda found: found is not None)
    assert refused is not None
    assert len(refused) < 8


def test_a_request_that_no_abort_ends_is_an_error_at_the_deadline(doomed: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the server does not know of, so it never ends it."""
    monkeypatch.setattr(sglang_engine, "ABORT_DEADLINE_S", 0.2)
    doomed._enter([request()], ["lost"])
    try:
        with pytest.raises(EngineError, match=r"did not end its 1 requests within 0\.2 s"):
            asyncio.run(doomed.pause("abort"))
    finally:
        doomed._leave(["lost"])
        asyncio.run(doomed.resume())


def test_the_first_tokens_carry_the_version_the_engine_was_started_with(doomed: SGLangEngine) -> None:
    assert set(asyncio.run(doomed.generate([request(new=4)]))[0].weight_versions.tolist()) == {7}


def test_nobody_else_is_served_without_the_key(doomed: SGLangEngine) -> None:
    import urllib.error
    import urllib.request

    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(doomed.url + "/model_info", timeout=10)


def test_the_key_stands_in_no_process_list(doomed: SGLangEngine) -> None:
    words = [Path(f"/proc/{pid}/cmdline").read_text() for pid in group_members(doomed.pid)]
    assert len(words) >= 3
    assert not any("api" in word for word in words)


def test_a_server_that_is_killed_ends_every_call_with_an_engine_error_and_leaves_nothing(doomed: SGLangEngine) -> None:
    group = doomed.pid
    files = shared_files(group)
    assert files, "SGLang keeps its load in shared memory"

    async def run() -> list:
        calls = [asyncio.ensure_future(doomed.generate([request(new=240, seed=i)])) for i in range(3)]
        await asyncio.sleep(0.2)
        os.kill(group, signal.SIGKILL)
        return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(run())
    assert [type(result) for result in results] == [EngineError] * 3
    assert "ended with code -9" in str(results[0])
    assert "the end of" in str(results[0])
    assert not asyncio.run(doomed.health()).ok
    asyncio.run(doomed.close())
    asyncio.run(doomed.close())
    assert list(group_members(group)) == []
    assert not [file for file in files if file.exists()]


OWNER = """
import asyncio, sys
from pathlib import Path
from tests.rollout.engines.test_sglang_process import engine_for
engine = engine_for(Path(sys.argv[1]), Path(sys.argv[2]))
async def main():
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(1.0)
    print(engine.pid, engine.scratch, flush=True)
    await starting
asyncio.run(main())
"""


def test_a_server_whose_owner_is_killed_goes_with_it(tiny_model: Path, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tiny_model), str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        group, scratch = owner.stdout.readline().split()
        assert list(group_members(int(group)))
        owner.kill()
    deadline = time.monotonic() + 60
    while (list(group_members(int(group))) or Path(scratch).exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (list(group_members(int(group))), Path(scratch).exists()) == ([], False)


@pytest.mark.full
def test_a_start_that_fails_ends_with_the_log_and_what_to_do(tiny_model: Path, tmp_path: Path) -> None:
    engine = engine_for(tiny_model, tmp_path, no_such_argument=3)
    with pytest.raises(EngineError, match=r"rollout\.sglang_args(.|\n)*no-such-argument"):
        asyncio.run(engine.start())
    asyncio.run(engine.close())


@pytest.mark.full
def test_two_tensor_parallel_ranks_serve_and_take_weights(tiny_model: Path, tmp_path: Path) -> None:
    engine = engine_for(tiny_model, tmp_path, tp_size=2)
    try:
        asyncio.run(engine.start())
        bench, new, asked = Bench(engine, tiny_model), changed(Bench(engine, tiny_model).base), request(new=24)
        assert bench.gap(asked, bench.generate(asked)[0]) < 2e-5
        bench.publish(new, tmp_path)
        assert bench.gap(asked, bench.generate(asked)[0], new) < 2e-5
    finally:
        asyncio.run(engine.close())
