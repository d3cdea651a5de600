"""What the torch engine promises beyond the conformance suite: exact log-probs, equal tokens for equal seeds, slots freed at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from miles.core.model.batch_invariant import make_batch_invariant
from miles.core.model.config import ModelConfig
from miles.core.model.decode import Decoder
from miles.core.model.packed import packed_logprobs
from rollout.engines.contracts import EngineError, Generation, Request, SamplingParams
from rollout.engines.torch_batch import Row, RunningBatch
from rollout.engines.torch_engine import TorchEngine
from rollout.engines.torch_weights import StagedWeights
from tests.conformance.engine_bench import changed, manifest_of
from tests.core.model.architectures import random_model
from weight_sync.contracts import Bucket, Manifest, SharedMemory

TEMPERATURE = 0.7


def request(number: int, *, length: int | None = None, new: int = 40, **sampling: Any) -> Request:
    length = 3 + 7 * number % 40 if length is None else length
    prompt = np.arange(number, number + length) % 40 + 9
    params = {"temperature": TEMPERATURE, "seed": number} | sampling
    return Request(request_id=f"0/{number}", prompt=prompt, sampling=SamplingParams(max_new_tokens=new, **params))


@pytest.fixture(scope="module", params=["tied GQA", "untied"])
def folder(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "tied GQA":
        return tiny_model
    folder = tmp_path_factory.mktemp("untied")
    random_model("llama", tie_word_embeddings=False, num_key_value_heads=4).save_pretrained(folder)
    return folder


@asynccontextmanager
async def engine_of(folder: Path, *, exact: bool = True, max_running: int = 6) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(ModelConfig(path=str(folder), true_on_policy=exact), max_running=max_running, threads=1)
    try:
        yield engine
    finally:
        await engine.close()


def trainer_model(folder: Path, *, exact: bool = True) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if exact:
        make_batch_invariant(model)
    return model


async def until_generated(engine: TorchEngine, tokens: int) -> None:
    """Wait until the engine has made so many tokens since it started."""
    while (await engine.health()).tokens_generated < tokens:
        await asyncio.sleep(0.001)


def gap(model: PreTrainedModel, requests: Sequence[Request], made: Sequence[Generation]) -> float:
    """The largest difference between recorded log-probs and those of all rows packed into one."""
    rows = [np.concatenate([r.prompt, r.generated, g.tokens]) for r, g in zip(requests, made, strict=True)]
    ends = np.cumsum([len(row) for row in rows])
    targets_N = np.concatenate([np.arange(end - len(g.tokens), end) for end, g in zip(ends, made, strict=True)])
    tokens_T = torch.from_numpy(np.concatenate(rows))
    positions_T = torch.cat([torch.arange(len(row)) for row in rows])
    sequence_T = torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row) for row in rows]))
    scored_N, _ = packed_logprobs(model, tokens_T, positions_T, sequence_T, torch.from_numpy(targets_N), TEMPERATURE, 128)
    return float((scored_N.detach() - torch.from_numpy(np.concatenate([g.logprobs for g in made]))).abs().max())


async def interrupted(engine: TorchEngine, requests: Sequence[Request], mode: str) -> list[Generation]:
    """Two calls at different times, three pauses; aborted requests go on."""
    half = len(requests) // 2
    parts: list[list[Generation]] = [[] for _ in requests]

    async def to_the_end(indices: Sequence[int]) -> None:
        pending = list(indices)
        while pending:
            asked = [replace(requests[i], generated=np.concatenate([np.zeros(0, np.int64), *(p.tokens for p in parts[i])])) for i in pending]
            for i, generation in zip(pending, await engine.generate(asked), strict=True):
                parts[i].append(generation)
            pending = [i for i in pending if parts[i][-1].finish == "abort"]

    tasks = [asyncio.ensure_future(to_the_end(range(half)))]
    for _ in range(3):
        await asyncio.sleep(0.03)
        await engine.pause(mode)  # type: ignore[arg-type]
        await asyncio.sleep(0.005)
        await engine.resume()
        if len(tasks) == 1:
            tasks.append(asyncio.ensure_future(to_the_end(range(half, len(requests)))))
    await asyncio.gather(*tasks)
    return [
        replace(
            some[-1],
            tokens=np.concatenate([p.tokens for p in some]),
            logprobs=np.concatenate([p.logprobs for p in some]),
            weight_versions=np.concatenate([p.weight_versions for p in some]),
        )
        for some in parts
    ]


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_with_true_on_policy_recorded_logprobs_are_the_trainer_s_bit_for_bit(folder: Path, mode: str) -> None:
    """Eleven requests of different lengths on six slots, admitted at different times and interrupted."""
    requests = [request(i, new=20 + 9 * i) for i in range(11)]

    async def run() -> list[Generation]:
        async with engine_of(folder) as engine:
            return await interrupted(engine, requests, mode)

    made = asyncio.run(run())
    assert [len(g.tokens) for g in made] == [r.sampling.max_new_tokens for r in requests]
    assert gap(trainer_model(folder), requests, made) == 0.0


def test_without_it_they_are_close_but_not_equal(folder: Path) -> None:
    requests = [request(i, new=20 + 9 * i) for i in range(11)]

    async def run() -> list[Generation]:
        async with engine_of(folder, exact=False) as engine:
            return await engine.generate(requests)

    assert 0.0 < gap(trainer_model(folder, exact=False), requests, asyncio.run(run())) < 1e-5


def test_equal_seeds_give_equal_tokens_whatever_runs_beside_and_however_often_interrupted(tiny_model: Path) -> None:
    requests = [request(i) for i in range(9)]

    async def run() -> tuple[list[Generation], ...]:
        async with engine_of(tiny_model) as engine:
            together = await engine.generate(requests)
            one_by_one = [(await engine.generate([asked]))[0] for asked in requests]
            return together, one_by_one, await interrupted(engine, requests, "abort"), await interrupted(engine, requests[::-1], "retract")

    together, one_by_one, aborted, reverse = asyncio.run(run())
    for others in (one_by_one, aborted, reverse[::-1]):
        for first, other in zip(together, others, strict=True):
            assert first.tokens.tolist() == other.tokens.tolist()
            assert first.logprobs.tolist() == other.logprobs.tolist()


def test_seeds_differ_by_request(tiny_model: Path) -> None:
    async def run() -> list[Generation]:
        async with engine_of(tiny_model) as engine:
            return await engine.generate([request(3, seed=seed) for seed in range(6)])

    assert len({tuple(g.tokens.tolist()) for g in asyncio.run(run())}) == 6


def test_a_request_aborted_twice_has_consistent_lengths_and_the_versions_of_its_parts(tiny_model: Path, tmp_path: Path) -> None:
    asked, weights = request(1, new=200), load_file(tiny_model / "model.safetensors")

    async def part(engine: TorchEngine, so_far: list[Generation]) -> None:
        goes_on = replace(asked, generated=np.concatenate([np.zeros(0, np.int64), *(p.tokens for p in so_far)]))
        made = (await engine.health()).tokens_generated
        running = asyncio.ensure_future(engine.generate([goes_on]))
        if len(so_far) < 2:
            await until_generated(engine, made + 20)
            await engine.abort([asked.request_id])
            publish(engine, changed(weights, len(so_far)), tmp_path)
        so_far.append((await running)[0])

    async def run() -> list[Generation]:
        parts: list[Generation] = []
        async with engine_of(tiny_model) as engine:
            for _ in range(3):
                await part(engine, parts)
        return parts

    parts = asyncio.run(run())
    assert [p.finish for p in parts] == ["abort", "abort", "length"]
    assert sum(len(p.tokens) for p in parts) == 200
    for version, p in enumerate(parts):
        assert 0 < len(p.tokens) == len(p.logprobs) == len(p.weight_versions)
        assert set(p.weight_versions.tolist()) == {version}


def publish(engine: TorchEngine, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    manifest = manifest_of(tensors, engine.weights_version() + 1, size=100)
    engine.weights_begin(manifest)
    path = folder / f"bucket-{manifest.version}"
    torch.cat([tensors[spec.name].reshape(-1) for spec in manifest.tensors]).numpy().tofile(path)
    engine.weights_receive(manifest.buckets[0], SharedMemory(str(path), path.stat().st_size))
    engine.weights_commit(manifest.version)


def test_after_an_update_every_token_is_scored_exactly_by_the_version_it_carries(tiny_model: Path, tmp_path: Path) -> None:
    """Retract mode: what was generated before is recomputed, so each part is on policy for its own weights."""
    requests = [request(i, new=150) for i in range(4)]
    new = changed(load_file(tiny_model / "model.safetensors"))

    async def run() -> list[Generation]:
        async with engine_of(tiny_model) as engine:
            running = asyncio.ensure_future(engine.generate(requests))
            await until_generated(engine, 40)
            await engine.pause("retract")
            await asyncio.to_thread(publish, engine, new, tmp_path)
            await engine.resume()
            return await running

    made = asyncio.run(run())
    before = [int((g.weight_versions == 0).sum()) for g in made]
    assert all(0 < count < 150 for count in before)
    first = [replace(g, tokens=g.tokens[:n], logprobs=g.logprobs[:n]) for g, n in zip(made, before, strict=True)]
    rest = [replace(g, tokens=g.tokens[n:], logprobs=g.logprobs[n:]) for g, n in zip(made, before, strict=True)]
    goes_on = [replace(r, generated=f.tokens) for r, f in zip(requests, first, strict=True)]
    model = trainer_model(tiny_model)
    assert gap(model, requests, first) == 0.0
    model.load_state_dict(new, strict=False)
    assert gap(model, goes_on, rest) == 0.0


def test_a_finished_row_frees_its_slot_for_the_next_token(tiny_model: Path) -> None:
    """Two slots; lengths 3, 9 and 4: the third starts when the first has ended, and all is done after nine steps."""
    batch = RunningBatch(Decoder(AutoModelForCausalLM.from_pretrained(tiny_model), 2, 256), 2)
    waiting = [Row(request(i, new=new), lambda made: None, lambda error: None) for i, new in enumerate([3, 9, 4])]
    ended = []
    for step in range(1, 10):
        while waiting and batch.free:
            batch.admit(waiting.pop(0))
        with torch.inference_mode():
            ended += [(step, row.request.request_id, len(made.tokens)) for row, made in batch.step(0)]
    assert ended == [(3, "0/0", 3), (7, "0/2", 4), (9, "0/1", 9)]
    assert not batch.rows


def test_requests_made_while_held_are_admitted_together(tiny_model: Path) -> None:
    async def run() -> tuple[int, int]:
        async with engine_of(tiny_model) as engine:
            with engine.hold():
                tasks = [asyncio.ensure_future(engine.generate([request(i)])) for i in range(3)]
                await asyncio.sleep(0.1)
                held = (await engine.health()).tokens_generated
            await asyncio.gather(*tasks)
            return held, (await engine.health()).tokens_generated

    assert asyncio.run(run()) == (0, 120)


def test_a_cancelled_caller_frees_its_rows(tiny_model: Path) -> None:
    async def run() -> tuple[int, int]:
        async with engine_of(tiny_model, max_running=1) as engine:
            tasks = [asyncio.ensure_future(engine.generate([request(i, new=200)])) for i in range(2)]
            await until_generated(engine, 5)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await engine.abort([])
            health = await engine.health()
            return health.running, health.waiting

    assert asyncio.run(run()) == (0, 0)


def test_weights_that_are_not_finite_end_the_engine_with_the_reason(tiny_model: Path, tmp_path: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.nan)

    async def run() -> None:
        async with engine_of(tiny_model) as engine:
            publish(engine, weights, tmp_path)
            with pytest.raises(EngineError, match="not finite"):
                await engine.generate([request(0)])
            assert not (await engine.health()).ok
            with pytest.raises(EngineError, match="not finite"):
                await engine.generate([request(0)])

    asyncio.run(run())


def test_closing_ends_running_requests_and_the_thread(tiny_model: Path) -> None:
    async def run() -> TorchEngine:
        async with engine_of(tiny_model) as engine:
            running = asyncio.ensure_future(engine.generate([request(0, new=200)]))
            await until_generated(engine, 5)
            await engine.close()
            with pytest.raises(EngineError, match="closed"):
                await running
        return engine

    assert not asyncio.run(run())._thread.is_alive()


def test_weights_are_expected_under_the_checkpoint_s_names(folder: Path) -> None:
    async def run() -> dict[str, tuple[int, ...]]:
        async with engine_of(folder) as engine:
            return {spec.name: spec.shape for spec in engine.weight_specs()}

    assert asyncio.run(run()) == {name: tuple(t.shape) for name, t in load_file(folder / "model.safetensors").items()}


def test_fused_experts_are_received_one_by_one() -> None:
    from transformers.core_model_loading import revert_weight_conversion

    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    served, new = random_model("qwen3_moe", **sizes), random_model("qwen3_moe", seed=1, **sizes)
    stored: dict[str, torch.Tensor] = {}
    for name, parameter in new.named_parameters():
        stored |= {n: t.clone() for n, t in revert_weight_conversion(new, {name: parameter.detach()}).items()}
    weights = StagedWeights(served, 0)
    bucket = Bucket(0, tuple(weights.specs.values()))
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in weights.specs
    weights.begin(Manifest(1, (bucket,)))
    weights._staged = stored
    weights.commit(1)
    assert all(torch.equal(a, b) for a, b in zip(served.parameters(), new.parameters(), strict=True))
