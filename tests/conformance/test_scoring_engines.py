"""What every engine does that scores tokens for a teacher, held against transformers. One suite for all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.core.model.config import ModelConfig
from rollout.engines.scoring import Scored, ScoreRequest, ScoringEngine
from tests.conformance.engine_bench import Bench
from tests.sglang_servers import routed

TOLERANCE = 2e-5  # as in test_engines.py
SGLANG = [pytest.mark.sglang, pytest.mark.timeout(400)]


@pytest.fixture(
    scope="module",
    params=[
        "torch",
        pytest.param("sglang", marks=SGLANG),
        pytest.param("address", marks=SGLANG, id="sglang-address"),
        pytest.param("router", marks=SGLANG, id="sglang-router"),
    ],
)
def scorer(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScoringEngine]:
    if request.param == "torch":
        from rollout.engines.torch_scorer import TorchScorer

        yield TorchScorer(ModelConfig(path=str(tiny_model)), temperature=1.0, threads=1)
        return
    engine = request.getfixturevalue("sglang_engine")
    bench = Bench(engine, tiny_model)
    bench.release()
    bench.publish(bench.base, tmp_path_factory.mktemp("weights"))
    if request.param == "sglang":
        yield engine
        return
    from rollout.engines.sglang_address import SGLangAddress

    key = engine._server._key
    log = tmp_path_factory.mktemp("router") / "log"
    with pytest.MonkeyPatch.context() as patch, routed([engine.url], key, log) if request.param == "router" else nullcontext(engine.url) as url:
        patch.setenv("TEACHER_KEY", key)
        address = SGLangAddress(url, api_key_env="TEACHER_KEY", timeout_s=60)
        asyncio.run(address.start())
        yield address


def asked(length: int, start: int, top_k: int = 0, seed: int = 0) -> ScoreRequest:
    return ScoreRequest(tokens=np.random.default_rng([seed, length]).integers(9, 53, length), start=start, top_k=top_k)


def score(scorer: ScoringEngine, *requests: ScoreRequest) -> list[Scored]:
    return asyncio.run(scorer.score(requests))


def oracle(folder: Path, request: ScoreRequest, temperature: float = 1.0) -> torch.Tensor:
    """float32 [R, V]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(request.tokens)[None]).logits[0]
    return torch.log_softmax(logits[request.start - 1 : -1] / temperature, -1)


def gap(found: Scored, request: ScoreRequest, logprobs_RV: torch.Tensor) -> float:
    """The largest difference from the oracle, of the tokens' own log-probs and of the likeliest ones'."""
    own = logprobs_RV.gather(1, torch.from_numpy(request.tokens[request.start :])[:, None])[:, 0]
    top = logprobs_RV.gather(1, torch.from_numpy(found.top_ids.astype(np.int64)))
    likeliest = logprobs_RV.topk(request.top_k, -1).values
    return max(float((a - torch.from_numpy(b)).abs().max()) for a, b in [(own, found.logprobs), (top, found.top_logprobs), (likeliest, found.top_logprobs)])


def test_scores_of_a_mixed_batch_are_those_of_transformers(scorer: ScoringEngine, tiny_model: Path) -> None:
    """Uneven lengths and starts, two with one prefix, and one as long as the context."""
    requests = [asked(20, 5, 3), asked(2, 1, 1), asked(20, 12, 53), asked(256, 250, 4), asked(33, 32, 7)]
    for request, found in zip(requests, score(scorer, *requests), strict=True):
        assert found.logprobs.shape == (len(request.tokens) - request.start,)
        assert found.top_ids.shape == found.top_logprobs.shape == (len(found.logprobs), request.top_k)
        assert (found.logprobs.dtype, found.top_ids.dtype, found.top_logprobs.dtype) == (np.float32, np.int32, np.float32)
        assert gap(found, request, oracle(tiny_model, request)) < TOLERANCE


def test_without_top_k_none_is_told(scorer: ScoringEngine) -> None:
    (found,) = score(scorer, asked(9, 4))
    assert found.top_ids.shape == found.top_logprobs.shape == (5, 0)


def test_nothing_after_the_prompt_has_no_scores(scorer: ScoringEngine) -> None:
    (found,) = score(scorer, asked(9, 9, 2))
    assert (found.logprobs.shape, found.top_ids.shape) == ((0,), (0, 2))


def test_no_requests_have_no_scores(scorer: ScoringEngine) -> None:
    assert score(scorer) == []


def test_many_at_once_keep_their_order(scorer: ScoringEngine) -> None:
    requests = [asked(6 + i % 5, 3, seed=i) for i in range(40)]
    together = score(scorer, *requests)
    alone = [score(scorer, request)[0] for request in requests[::13]]
    for a, b in zip(together[::13], alone, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)


def test_calls_at_the_same_time_do_not_disturb_each_other(scorer: ScoringEngine) -> None:
    requests = [asked(200 + i, 3, seed=i) for i in range(16)]
    together = asyncio.run(all_at_once(scorer, requests))
    for request, found in zip(requests, together, strict=True):
        np.testing.assert_allclose(found.logprobs, score(scorer, request)[0].logprobs, atol=TOLERANCE)


async def all_at_once(scorer: ScoringEngine, requests: list[ScoreRequest]) -> list[Scored]:
    return [found for (found,) in await asyncio.gather(*(scorer.score([request]) for request in requests))]


def test_the_torch_engine_scores_at_the_sampling_temperature(tiny_model: Path) -> None:
    from rollout.engines.torch_scorer import TorchScorer

    request = asked(20, 5, 3)
    (found,) = score(TorchScorer(ModelConfig(path=str(tiny_model)), temperature=0.6, threads=1), request)
    assert gap(found, request, oracle(tiny_model, request, 0.6)) < TOLERANCE


@pytest.mark.parametrize(
    ("request_", "message"),
    [(asked(300, 5), "context is 256"), (asked(9, 3, 54), "do not fit a vocabulary of 53"), (asked(9, 0), "the first token has nothing before it")],
)
def test_what_does_not_fit_is_refused(tiny_model: Path, request_: ScoreRequest, message: str) -> None:
    from rollout.engines.torch_scorer import TorchScorer

    with pytest.raises(ValueError, match=message):
        score(TorchScorer(ModelConfig(path=str(tiny_model)), temperature=1.0, threads=1), request_)
