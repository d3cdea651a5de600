"""What every rollout engine does, held against transformers. One suite for all engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from miles.core.model.config import ModelConfig
from rollout.engines.contracts import Engine, EngineError, Request
from tests.conformance.engine_bench import FULL, Bench, changed, manifest_of, request
from weight_sync.contracts import FromGroup, WeightSyncError

TOLERANCE = 2e-5  # float32 log-probs of two implementations that sum in different orders
CONTEXT = 256  # of the tiny model

# Long responses that run beside the one under test, so that a busy machine has time to cut that one before its end.
CROWD = [request(new=FULL, start=i, seed=i, name=f"crowd/{i}") for i in range(16)]


@pytest.fixture(scope="session")
def torch_engine(tiny_model: Path) -> Iterator[Engine]:
    from rollout.engines.torch_engine import TorchEngine

    engine = TorchEngine(ModelConfig(path=str(tiny_model)), max_running=32, threads=1)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="session", params=["torch", pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(400)])])
def shared_bench(request: pytest.FixtureRequest, tiny_model: Path) -> Bench:
    return Bench(request.getfixturevalue(f"{request.param}_engine"), tiny_model)


@pytest.fixture
def bench(shared_bench: Bench, tmp_path: Path) -> Iterator[Bench]:
    shared_bench.settle(tmp_path)
    yield shared_bench
    shared_bench.release()


def test_results_come_in_the_order_of_the_requests(bench: Bench) -> None:
    requests = [request(length, new=new, start=length) for length, new in [(3, 9), (40, 1), (7, 30), (1, 4)]]
    made = bench.generate(*requests)
    assert [(g.request_id, len(g.tokens)) for g in made] == [(r.request_id, r.sampling.max_new_tokens) for r in requests]


def test_all_fields_have_one_entry_per_token(bench: Bench) -> None:
    made = bench.generate(request(new=11))[0]
    assert (len(made.tokens), len(made.logprobs), len(made.weight_versions)) == (11, 11, 11)
    assert (made.tokens.dtype, made.logprobs.dtype, made.weight_versions.dtype) == (np.int64, np.float32, np.int32)
    assert made.finish == "length"


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_logprobs_are_those_of_the_distribution_at_the_sampling_temperature(bench: Bench, temperature: float) -> None:
    requests = [request(5 + i, new=24, seed=i, start=i, temperature=temperature) for i in range(4)]
    assert max(bench.gap(r, g) for r, g in zip(requests, bench.generate(*requests), strict=True)) < TOLERANCE


def test_greedy_takes_the_most_likely_token_and_records_its_logprob_at_temperature_one(bench: Bench) -> None:
    asked = request(new=24, temperature=0)
    made = bench.generate(asked)[0]
    assert made.tokens.tolist() == bench.oracle(asked, made.tokens).argmax(-1).tolist()
    assert bench.gap(asked, made) < TOLERANCE


def test_greedy_and_sampled_requests_share_a_batch(bench: Bench) -> None:
    requests = [request(new=12, temperature=t, start=i) for i, t in enumerate([0, 1.0, 0, 0.7])]
    made = bench.generate(*requests)
    assert max(bench.gap(r, g) for r, g in zip(requests, made, strict=True)) < TOLERANCE
    assert made[0].tokens.tolist() == bench.generate(requests[0])[0].tokens.tolist()


@pytest.mark.parametrize("top_k", [1, 3])
def test_top_k_keeps_the_k_most_likely_and_logprobs_of_the_whole_distribution(bench: Bench, top_k: int) -> None:
    asked = request(new=40, top_k=top_k)
    made = bench.generate(asked)[0]
    kept = bench.oracle(asked, made.tokens).topk(top_k).indices
    assert (kept == torch.tensor(made.tokens)[:, None]).any(-1).all()
    assert bench.gap(asked, made) < TOLERANCE


def test_top_p_keeps_the_nucleus_and_logprobs_of_the_whole_distribution(bench: Bench) -> None:
    asked = request(new=40, top_p=0.3)
    made = bench.generate(asked)[0]
    ordered, order = bench.oracle(asked, made.tokens).exp().sort(descending=True)
    rank = (order == torch.tensor(made.tokens)[:, None]).int().argmax(-1)
    mass_before = (ordered.cumsum(-1) - ordered).gather(1, rank[:, None])[:, 0]
    assert (mass_before < 0.3 + 1e-5).all()
    assert bench.gap(asked, made) < TOLERANCE


def test_a_stop_token_ends_the_response_and_is_part_of_it(bench: Bench) -> None:
    free = bench.generate(request(new=24, temperature=0))[0].tokens.tolist()
    stop = free[7]
    made = bench.generate(request(new=24, temperature=0, stop_token_ids=(bench.end, stop)))[0]
    assert made.tokens.tolist() == free[: free.index(stop) + 1]
    assert made.finish == "stop"


def test_without_stop_tokens_nothing_but_the_length_ends_a_response(bench: Bench) -> None:
    made = bench.generate(*[request(new=100, seed=i, start=i) for i in range(8)])
    assert bench.end in np.concatenate([g.tokens for g in made])
    assert {g.finish for g in made} == {"length"}


def test_the_last_place_of_the_context_is_used(bench: Bench) -> None:
    asked = request(CONTEXT - 3, new=10)
    made = bench.generate(asked)[0]
    assert (len(made.tokens), made.finish) == (3, "length")
    assert bench.gap(asked, made) < TOLERANCE


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (replace(request(), prompt=np.zeros(0, np.int64)), "empty"),
        (request(CONTEXT), "256"),
        (request(CONTEXT - 4, new=9, generated=[9, 9, 9, 9]), "256"),
        (replace(request(), prompt=np.asarray([9, 100_000])), "100000"),
    ],
    ids=["empty prompt", "full context", "full context after a partial response", "token outside the vocabulary"],
)
def test_a_request_that_cannot_be_served_is_refused_by_name(bench: Bench, asked: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench.generate(asked)
    assert len(bench.generate(request(new=3))[0].tokens) == 3


def test_generated_tokens_are_continued_up_to_the_same_length(bench: Bench) -> None:
    whole = bench.generate(request(new=20, temperature=0))[0].tokens
    rest = request(new=20, temperature=0, generated=whole[:8])
    made = bench.generate(rest)[0]
    assert made.tokens.tolist() == whole[8:].tolist()
    assert bench.gap(rest, made) < TOLERANCE


def test_aborted_requests_return_what_they_have_and_can_go_on(bench: Bench) -> None:
    asked = [request(new=FULL, seed=i, start=i, name=f"7/{i}") for i in range(2)]

    async def run() -> list:
        running, crowd = await bench.under_way(asked, CROWD)
        await bench.engine.abort(["7/0", "7/1"])
        await crowd
        return await running

    parts = bench.caught(lambda: asyncio.run(run()), lambda parts: all(g.finish == "abort" and len(g.tokens) for g in parts))
    assert [g.finish for g in parts] == ["abort", "abort"]
    for first, part in zip(asked, parts, strict=True):
        assert 0 < len(part.tokens) < FULL
        assert len(part.tokens) == len(part.logprobs) == len(part.weight_versions)
        goes_on = replace(first, generated=part.tokens)
        rest = bench.generate(goes_on)[0]
        assert len(part.tokens) + len(rest.tokens) == FULL
        assert max(bench.gap(first, part), bench.gap(goes_on, rest)) < TOLERANCE


def test_abort_takes_only_the_named_request(bench: Bench) -> None:
    """Ids that begin alike are different requests."""

    async def run() -> list:
        running = await bench.under_way([request(new=FULL, name="5/1")], [request(new=FULL, name="5/10"), *CROWD])
        await bench.engine.abort(["5/1"])
        return [(await task)[0] for task in running]

    made = bench.caught(lambda: asyncio.run(run()), lambda made: made[0].finish == "abort")
    assert [g.finish for g in made] == ["abort", "length"]


def _generate_across_a_pause(bench: Bench, asked: Request, mode: str, meanwhile=lambda: None) -> tuple:
    """Pause once the request runs, do `meanwhile`, resume. Also generates `late`, submitted during the pause."""
    late = request(new=4, start=3, name="late")

    async def run() -> tuple:
        running, crowd = await bench.under_way([asked], CROWD)
        await bench.engine.pause(mode)
        waiting = asyncio.ensure_future(bench.engine.generate([late]))
        await asyncio.to_thread(meanwhile)
        await asyncio.sleep(0.1)
        assert not waiting.done(), "a paused engine generated"
        await bench.engine.resume()
        await crowd
        return (await running)[0], late, (await waiting)[0]

    return asyncio.run(run())


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_ends_or_keeps_running_requests_as_its_mode_says(bench: Bench, mode: str) -> None:
    asked = request(new=FULL)
    made, late, late_made = bench.caught(lambda: _generate_across_a_pause(bench, asked, mode), lambda made: mode != "abort" or made[0].finish == "abort")
    assert made.finish == ("abort" if mode == "abort" else "length")
    assert (len(made.tokens) == FULL) == (mode != "abort")
    assert max(bench.gap(asked, made), bench.gap(late, late_made)) < TOLERANCE


@pytest.mark.parametrize("broadcast", [False, True], ids=["shared memory", "broadcast"])
def test_an_update_serves_the_new_weights_from_the_next_token_on(bench: Bench, tmp_path: Path, broadcast: bool) -> None:
    asked, new = request(new=24), changed(bench.base)
    before, old = bench.generate(asked)[0], bench.version
    digests = bench.publish(new, tmp_path, broadcast=broadcast)
    after = bench.generate(asked)[0]
    assert (bench.gap(asked, before), bench.gap(asked, after, new)) < (TOLERANCE, TOLERANCE)
    assert bench.gap(asked, after) > 1e-2
    assert (set(before.weight_versions.tolist()), set(after.weight_versions.tolist())) == ({old}, {old + 1})
    assert digests == {name: xxhash.xxh3_64_hexdigest(t.numpy().tobytes()) for name, t in new.items()}


def test_the_same_update_without_digests_returns_none(bench: Bench, tmp_path: Path) -> None:
    manifest = bench.send(bench.base, tmp_path)
    assert bench.engine.weights_prepared(False) == {}
    bench.engine.weights_commit(manifest.version)
    bench.engine.weights_commit(manifest.version)
    assert bench.version == manifest.version


@pytest.mark.parametrize("buckets", [1, None], ids=["after one bucket", "after all buckets"])
def test_an_aborted_update_leaves_the_old_weights(bench: Bench, tmp_path: Path, buckets: int | None) -> None:
    asked, old = request(new=16), bench.version
    bench.send(changed(bench.base, 2), tmp_path, buckets=buckets)
    bench.engine.weights_abort()
    bench.engine.weights_abort()
    made = bench.generate(asked)[0]
    assert bench.gap(asked, made) < TOLERANCE
    assert set(made.weight_versions.tolist()) == {old} == {bench.version}


def test_an_aborted_update_goes_back_to_weights_that_came_by_an_update(bench: Bench, tmp_path: Path) -> None:
    asked, first = request(new=16), changed(bench.base, 3)
    bench.publish(first, tmp_path)
    bench.send(changed(bench.base, 4), tmp_path, buckets=2)
    bench.engine.weights_abort()
    assert bench.gap(asked, bench.generate(asked)[0], first) < TOLERANCE
    bench.publish(changed(bench.base, 4), tmp_path)
    assert bench.gap(asked, bench.generate(asked)[0], changed(bench.base, 4)) < TOLERANCE


def test_a_sender_that_goes_away_fails_the_update_and_the_old_weights_stay(bench: Bench, tmp_path: Path) -> None:
    asked = request(new=16)
    manifest = bench.send(changed(bench.base, 5), tmp_path, broadcast=True, buckets=2)
    with pytest.raises(WeightSyncError, match="bucket 2"):
        bench.engine.weights_receive(manifest.buckets[2], FromGroup())
    bench.engine.weights_abort()
    assert bench.gap(asked, bench.generate(asked)[0]) < TOLERANCE


def _without(tensors: dict, name: str) -> dict:
    return {n: t for n, t in tensors.items() if n != name}


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: {**t, NORM: torch.zeros(3)}, NORM),
        (lambda t: {**t, NORM: t[NORM].to(torch.bfloat16)}, NORM),
        (lambda t: {**t, "model.norm.bias": torch.zeros(64)}, r"model\.norm\.bias"),
        (lambda t: _without(t, NORM), NORM),
    ],
    ids=["shape", "dtype", "unknown name", "left out"],
)
def test_a_manifest_that_does_not_fit_is_refused_by_name_and_the_engine_goes_on(bench: Bench, tmp_path: Path, spoil, message: str) -> None:
    with pytest.raises(WeightSyncError, match=message):
        bench.send(spoil(bench.base), tmp_path, buckets=0)
    asked = request(new=8)
    assert bench.gap(asked, bench.generate(asked)[0]) < TOLERANCE


def test_a_bucket_whose_file_has_another_size_is_refused_and_the_engine_goes_on(bench: Bench, tmp_path: Path) -> None:
    manifest = manifest_of(bench.base, bench.version + 1, size=1)
    bench.engine.weights_begin(manifest)
    with bench.payloads(manifest.buckets, bench.base, tmp_path) as payloads, pytest.raises(WeightSyncError, match="bytes"):
        bench.engine.weights_receive(manifest.buckets[0], payloads(manifest.buckets[1]))
    bench.engine.weights_abort()
    asked = request(new=8)
    assert bench.gap(asked, bench.generate(asked)[0]) < TOLERANCE


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_an_update_during_generation_marks_each_token_with_its_version(bench: Bench, tmp_path: Path, mode: str) -> None:
    asked, new = request(new=FULL), changed(bench.base, 6)

    def attempt() -> tuple:
        bench.settle(tmp_path)
        return *_generate_across_a_pause(bench, asked, mode, lambda: bench.publish(new, tmp_path)), bench.version - 1

    made, late, late_made, old = bench.caught(attempt, lambda made: 0 < made[0].weight_versions.tolist().count(made[3]) < FULL)
    versions = made.weight_versions.tolist()
    before = versions.count(old)
    assert versions == [old] * before + [old + 1] * (len(versions) - before)
    assert before > 0
    first = replace(made, tokens=made.tokens[:before], logprobs=made.logprobs[:before])
    assert bench.gap(asked, first) < TOLERANCE
    if mode == "retract":  # the cache was recomputed: the rest is the new weights' own
        rest = replace(made, tokens=made.tokens[before:], logprobs=made.logprobs[before:])
        assert bench.gap(replace(asked, generated=first.tokens), rest, new) < TOLERANCE
    assert bench.gap(late, late_made, new) < TOLERANCE


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_prompt_seen_before_an_update_is_not_answered_from_old_keys_and_values(bench: Bench, tmp_path: Path, mode: str) -> None:
    asked, new = request(60, new=8), changed(bench.base, 7)
    bench.generate(asked)
    asyncio.run(bench.engine.pause(mode))
    bench.publish(new, tmp_path)
    asyncio.run(bench.engine.resume())
    assert bench.gap(asked, bench.generate(asked)[0], new) < TOLERANCE


def test_a_sleeping_engine_refuses_to_generate_and_wakes_with_its_weights(bench: Bench, tmp_path: Path) -> None:
    asked, new = request(new=8), changed(bench.base, 8)
    bench.publish(new, tmp_path)
    asyncio.run(bench.engine.sleep())
    with pytest.raises(EngineError, match="asleep"):
        bench.generate(asked)
    asyncio.run(bench.engine.wake())
    assert bench.gap(asked, bench.generate(asked)[0], new) < TOLERANCE


def test_health_counts_what_runs(bench: Bench) -> None:
    async def run() -> tuple:
        before = await bench.engine.health()
        (running,) = await bench.under_way(CROWD)
        during = await bench.engine.health()
        await running
        return before, during, await bench.engine.health()

    before, during, after = asyncio.run(run())
    assert (before.ok, during.ok, after.ok) == (True, True, True)
    assert (before.running, during.running, after.running) == (0, len(CROWD), 0)
    assert after.tokens_generated - before.tokens_generated == len(CROWD) * FULL
    assert after.seconds_busy > before.seconds_busy
    assert after.weight_version == bench.version
