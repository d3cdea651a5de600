"""Scoring engine `torch`: a frozen model in the caller's process, on the packed rows and the chunked output head that trainers use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miles.core.model.config import ModelConfig
from miles.core.model.load import load_model, longest_sequence
from miles.core.model.packed import output_head, through_head
from miles.core.model.scoring import scaled_logits
from miles.data.packing import microbatches
from rollout.engines.scoring import Scored, ScoreRequest, check_score_request

_ROW_TOKENS = 8192  # tokens of one packed forward
_CHUNK = 256  # tokens whose logits exist at once


class TorchScorer:
    """See `ScoringEngine`.

    Args:
        temperature: of the distribution whose log-probs are told.
        threads: CPU threads of this process's torch.
    Raises:
        ValueError: the model cannot be read.
    """

    def __init__(self, model: ModelConfig, *, temperature: float, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = load_model(model.path, getattr(torch, model.dtype), trust_remote_code=model.trust_remote_code).requires_grad_(False)
        self._temperature, self._context = temperature, longest_sequence(model)
        self._head = output_head(self._model)
        self._lock = threading.Lock()  # the output head is exchanged for the length of a forward

    async def start(self) -> None:
        pass

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        for request in requests:
            check_score_request(request, context=self._context, vocabulary=len(self._head.weight))
        return await asyncio.to_thread(self._score, requests)

    async def close(self) -> None:
        pass

    def _score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        results: dict[int, Scored] = {}
        for row in microbatches([len(request.tokens) for request in requests], _ROW_TOKENS):
            with self._lock:
                results |= dict(zip(row, self._row([requests[i] for i in row]), strict=True))
        return [results[i] for i in range(len(requests))]

    @torch.inference_mode()
    def _row(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        lengths = torch.tensor([len(request.tokens) for request in requests])
        starts = (lengths.cumsum(0) - lengths).tolist()
        tokens_T = torch.from_numpy(np.concatenate([request.tokens for request in requests]))
        places_N = torch.cat([torch.arange(s + r.start, s + len(r.tokens)) for s, r in zip(starts, requests, strict=True)])
        positions_T = torch.cat([torch.arange(length) for length in lengths.tolist()])
        sequence_T = torch.arange(len(requests)).repeat_interleave(lengths)
        width, targets_N = max(request.top_k for request in requests), tokens_T[places_N]
        parts: list[tuple[Tensor, Tensor, Tensor]] = []

        def told(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
            for start in range(0, len(hidden_ND), _CHUNK):
                logits_CV = scaled_logits(hidden_ND[start : start + _CHUNK], weight_VD, self._temperature, torch.nn.functional.linear)
                logits_CV -= logits_CV.logsumexp(-1, keepdim=True)
                parts.append((logits_CV.gather(1, targets_N[start : start + _CHUNK, None])[:, 0], *logits_CV.topk(width, -1)))
            return hidden_ND.new_zeros(1)

        through_head(self._model, tokens_T, positions_T, sequence_T, places_N - 1, told)
        logprobs_N, top_logprobs_NK, top_ids_NK = (torch.cat(part).numpy() for part in zip(*parts, strict=True)) if parts else _nothing(width)
        ends = np.cumsum([len(request.tokens) - request.start for request in requests])[:-1]
        return [
            Scored(logprobs=a.astype(np.float32), top_ids=i[:, : r.top_k].astype(np.int32), top_logprobs=t[:, : r.top_k].astype(np.float32))
            for r, a, t, i in zip(requests, np.split(logprobs_N, ends), np.split(top_logprobs_NK, ends), np.split(top_ids_NK, ends), strict=True)
        ]


def _nothing(width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros(0, np.float32), np.zeros((0, width), np.float32), np.zeros((0, width), np.int64)
