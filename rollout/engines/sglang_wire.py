"""Requests and generations as SGLang's `/generate` speaks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engines.contracts import EngineError, Generation, Request
from rollout.engines.sglang_args import ModelFacts


def check_request(request: Request, facts: ModelFacts) -> None:
    """Refuse what SGLang would refuse without a name, truncate in silence, or die of. Raises ValueError."""
    tokens = np.concatenate([request.prompt, request.generated])
    if len(request.prompt) == 0:
        raise ValueError(f"request {request.request_id}: the prompt is empty")
    if len(tokens) >= facts.context:
        raise ValueError(f"request {request.request_id}: {len(tokens)} tokens leave no room for a new one in a context of {facts.context}")
    if tokens.min() < 0 or tokens.max() >= facts.vocabulary:
        raise ValueError(f"request {request.request_id}: token ids span {tokens.min()}..{tokens.max()}, the vocabulary is 0..{facts.vocabulary - 1}")
    if len(request.generated) >= request.sampling.max_new_tokens:
        raise ValueError(
            f"request {request.request_id}: {len(request.generated)} tokens are generated already and max_new_tokens is {request.sampling.max_new_tokens}"
        )
    stops = set(request.sampling.stop_token_ids)
    if stops and not facts.end_tokens <= stops:
        raise ValueError(
            f"request {request.request_id}: stop_token_ids {sorted(stops)} lack {sorted(facts.end_tokens - stops)}; "
            "SGLang always ends at the model's own end tokens, so name them too"
        )


def request_body(requests: Sequence[Request], server_ids: Sequence[str], facts: ModelFacts, commits: int, seeded: bool) -> dict[str, Any]:
    """One HTTP body for all `requests`."""
    return {
        "rid": list(server_ids),
        "input_ids": [[*request.prompt.tolist(), *request.generated.tolist()] for request in requests],
        "sampling_params": [_sampling(request, facts, seeded) for request in requests],
        "return_logprob": True,
        # The prefix cache is kept apart by update (not by version: a rewound run uses a number twice): keys and values of old
        # weights never serve a new request, even where an update in place could not empty the cache.
        "extra_key": f"commit-{commits}",
    }


def generation(request: Request, answer: dict[str, Any]) -> Generation:
    """Raises EngineError when the answer does not fit together."""
    meta = answer["meta_info"]
    tokens = np.asarray(answer["output_ids"], np.int64)
    scored = meta.get("output_token_logprobs") or []
    if [entry[1] for entry in scored] != tokens.tolist():
        raise EngineError(f"request {request.request_id}: SGLang returned {len(tokens)} tokens and {len(scored)} log-probs, which do not belong together")
    return Generation(
        request_id=request.request_id,
        tokens=tokens,
        logprobs=np.asarray([entry[0] for entry in scored], np.float32),
        weight_versions=_versions(request, meta, len(tokens)),
        finish=meta["finish_reason"]["type"],
    )


def _sampling(request: Request, facts: ModelFacts, seeded: bool) -> dict[str, Any]:
    sampling = request.sampling
    used = len(request.prompt) + len(request.generated)
    parameters: dict[str, Any] = {
        "max_new_tokens": min(sampling.max_new_tokens - len(request.generated), facts.context - used),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,
    }
    if seeded:
        parameters["sampling_seed"] = sampling.seed
    return parameters


def _versions(request: Request, meta: dict[str, Any], count: int) -> NDArray[np.int32]:
    versions = np.full(count, -1, np.int32)
    for span in meta.get("weight_versions", ()):
        versions[span["start"] : span["end"]] = int(span["version"])
    if (versions < 0).any():
        raise EngineError(f"request {request.request_id}: SGLang named the weight version of {(versions >= 0).sum()} of {count} tokens")
    return versions
