"""Scores by SGLang's prompt log-probs: a request that generates nothing and tells the log-probs of its own tokens.

SGLang gives prompt log-probs at temperature 1, whatever temperature is asked for.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.engines.contracts import EngineError
from rollout.engines.scoring import Scored, ScoreRequest


def score_body(requests: Sequence[ScoreRequest], *, extra_key: str | None = None) -> dict[str, Any]:
    """One HTTP body of `/generate` for all `requests`. `extra_key` keeps the prefix cache apart, as in `sglang_wire.request_body`."""
    body: dict[str, Any] = {
        "input_ids": [request.tokens.tolist() for request in requests],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        # The entry at this place is that of the token itself, without a score.
        "logprob_start_len": [request.start - 1 for request in requests],
        "top_logprobs_num": [request.top_k for request in requests],
        # Numbers as bytes: of a nested list of triples, decoding costs more than the model. Older servers do not know it and send the list.
        "return_flat_raw_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
    }
    return body if extra_key is None else body | {"extra_key": extra_key}


def one_score_body(request: ScoreRequest) -> dict[str, Any]:
    """The same of a single request, which is answered by a single object."""
    return {name: value[0] if isinstance(value, list) else value for name, value in score_body([request]).items()}


def scored(request: ScoreRequest, answer: dict[str, Any]) -> Scored:
    """Raises EngineError when the answer does not fit together."""
    meta = answer["meta_info"]
    own = meta.get("input_token_logprobs") or []
    wanted = request.tokens[request.start :].tolist()
    entries = own[len(own) - len(wanted) :]
    # SGLang scores the vocabulary's last token rightly and calls it 0.
    theirs = len(entries) == len(wanted) and all(entry[0] is not None and entry[1] in (token, 0) for entry, token in zip(entries, wanted, strict=True))
    if not theirs:
        raise EngineError(f"SGLang was asked for the log-probs of {len(wanted)} tokens and told {len(own)}, which are not theirs")
    top_ids, top_logprobs = _top(request, meta, len(wanted))
    return Scored(logprobs=np.array([entry[0] for entry in entries], np.float32), top_ids=top_ids, top_logprobs=top_logprobs)


def _top(request: ScoreRequest, meta: dict[str, Any], count: int) -> tuple[np.ndarray, np.ndarray]:
    if request.top_k == 0 or count == 0:
        return np.zeros((count, request.top_k), np.int32), np.zeros((count, request.top_k), np.float32)
    if "input_top_logprobs_shape" in meta:
        shape = meta["input_top_logprobs_shape"]
        ids = np.frombuffer(base64.b64decode(meta["input_top_logprobs_idx_flat_b64"]), meta["input_top_logprobs_idx_flat_b64_dtype"]).reshape(shape)
        logprobs = np.frombuffer(base64.b64decode(meta["input_top_logprobs_val_flat_b64"]), meta["input_top_logprobs_val_flat_b64_dtype"]).reshape(shape)
    else:
        rows = [row for row in meta.get("input_top_logprobs") or [] if row]
        ids = np.array([[entry[1] for entry in row] for row in rows], np.int32)
        logprobs = np.array([[entry[0] for entry in row] for row in rows], np.float32)
    ids, logprobs = ids[len(ids) - count :], logprobs[len(logprobs) - count :]
    if ids.shape != (count, request.top_k) or logprobs.shape != ids.shape:
        raise EngineError(f"SGLang was asked for {count} x {request.top_k} likeliest tokens and told {ids.shape}")
    return ids.astype(np.int32), logprobs.astype(np.float32)
