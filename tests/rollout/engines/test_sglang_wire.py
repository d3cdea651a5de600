"""What goes to `/generate` and what is made of its answer, without a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout.engines.contracts import EngineError, Request, SamplingParams
from rollout.engines.sglang_args import ModelFacts
from rollout.engines.sglang_wire import check_request, generation, request_body

FACTS = ModelFacts(
    folder=Path("model"), context=20, vocabulary=50, end_tokens=frozenset({3}), tied=True, cache_bytes_per_token=1, architecture="Qwen3ForCausalLM"
)


def asked(generated: list[int] | None = None, **sampling: object) -> Request:
    params = SamplingParams(**{"max_new_tokens": 8, **sampling})
    return Request(request_id="4/2", prompt=np.arange(10, 14), sampling=params, generated=np.asarray(generated or [], np.int64))


def body(request: Request, seeded: bool = False) -> dict:
    return request_body([request], ["a"], FACTS, 5, seeded)


def answer(tokens: list[int], spans: list[tuple[str, int, int]], scored: list[int] | None = None, reason: str = "length") -> dict:
    entries = [[-0.5 * i, token, None] for i, token in enumerate(tokens if scored is None else scored)]
    versions = [{"version": v, "start": s, "end": e} for v, s, e in spans]
    return {"output_ids": tokens, "meta_info": {"output_token_logprobs": entries, "weight_versions": versions, "finish_reason": {"type": reason}}}


def test_a_partial_response_is_part_of_the_input_and_of_the_length() -> None:
    sent = body(asked([7, 8, 9]))
    assert sent["input_ids"] == [[10, 11, 12, 13, 7, 8, 9]]
    assert sent["sampling_params"][0]["max_new_tokens"] == 5


def test_the_length_is_cut_to_the_context() -> None:
    assert body(asked(max_new_tokens=100))["sampling_params"][0]["max_new_tokens"] == 16


@pytest.mark.parametrize(("top_k", "sent"), [(0, -1), (7, 7)])
def test_no_top_k_is_minus_one_to_sglang(top_k: int, sent: int) -> None:
    assert body(asked(top_k=top_k))["sampling_params"][0]["top_k"] == sent


@pytest.mark.parametrize("seeded", [False, True])
def test_a_seed_is_sent_in_deterministic_mode_only(seeded: bool) -> None:
    assert body(asked(seed=6), seeded)["sampling_params"][0].get("sampling_seed") == (6 if seeded else None)


def test_the_prefix_cache_is_kept_apart_by_update() -> None:
    keys = {request_body([asked()], ["a"], FACTS, commits, False)["extra_key"] for commits in range(3)}
    assert len(keys) == 3


def test_each_token_gets_the_version_of_its_span() -> None:
    made = generation(asked(), answer([20, 21, 22], [("5", 0, 1), ("6", 1, 3)]))
    assert made.weight_versions.tolist() == [5, 6, 6]
    assert made.logprobs.tolist() == [0.0, -0.5, -1.0]


def test_an_aborted_request_that_never_ran_is_empty() -> None:
    made = generation(asked(), {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}})
    assert (made.tokens.tolist(), made.finish) == ([], "abort")


def test_tokens_without_a_version_are_an_engine_error() -> None:
    with pytest.raises(EngineError, match="1 of 2 tokens"):
        generation(asked(), answer([20, 21], [("5", 0, 1)]))


def test_logprobs_of_other_tokens_are_an_engine_error() -> None:
    with pytest.raises(EngineError, match="do not belong together"):
        generation(asked(), answer([20, 21], [("5", 0, 2)], scored=[20, 22]))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (replace(asked(), prompt=np.zeros(0, np.int64)), "empty"),
        (replace(asked(), prompt=np.arange(20)), "20 tokens leave no room"),
        (asked([50]), r"span 10\.\.50, the vocabulary is 0\.\.49"),
        (asked([9] * 8), "8 tokens are generated already"),
        (asked(stop_token_ids=(5,)), r"lack \[3\]"),
    ],
    ids=["empty", "context", "vocabulary", "nothing left", "own end token"],
)
def test_what_cannot_be_served_is_refused(request_: Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(request_, FACTS)
