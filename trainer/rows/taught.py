"""What a teacher outside of the trainer, or with another tokenizer, says of one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.distillation.sampled import Spans
from miles.data.packing import pack
from miles.data.taught import Reading
from miles.data.types import Sample, Status
from trainer.rows.row import Row, row_of
from trainer.rows.share import MicroBatch


@dataclass(kw_only=True, eq=False)
class TaughtRow:
    """Beside a row of N response tokens, of which the teacher reads Q.

    Attributes:
        logprobs_Q: float32, as the teacher's engine told them; or None.
        spans: which tokens write the same text; None where the teacher's tokens are the student's, so that Q = N.
        reading: the row in the teacher's tokens, where the trainer's own teacher is to score it.
        top_ids_NK, top_logprobs_NK: int64 and float32, or None where they were not asked for.
    """

    logprobs_Q: Tensor | None
    spans: Spans | None
    reading: Row | None
    top_ids_NK: Tensor | None
    top_logprobs_NK: Tensor | None


def taught_row(row: Row, device: torch.device) -> TaughtRow | None:
    """What `row` carries of its samples, all of which were taught in the same way; None where nothing was said."""
    taught = [told for told in row.taught if told is not None]
    if not taught:
        return None
    assert len(taught) == len(row.taught), "a batch is taught whole"
    readings = [told.reading for told in taught if told.reading is not None]
    logprobs, top_ids, top_logprobs = (_joined([getattr(told, name) for told in taught], device) for name in ("logprobs_Q", "top_ids_RK", "top_logprobs_RK"))
    return TaughtRow(
        logprobs_Q=logprobs,
        spans=_spans(readings, device) if readings else None,
        reading=_row(readings, device) if readings and logprobs is None else None,
        top_ids_NK=None if top_ids is None else top_ids.long(),
        top_logprobs_NK=top_logprobs,
    )


def _spans(readings: Sequence[Reading], device: torch.device) -> Spans:
    """Numbered on through the row."""
    counts = [int(max(r.span_R.max(initial=-1), r.span_Q.max(initial=-1))) + 1 for r in readings]
    first = np.cumsum([0, *counts])

    def numbered(spans: list[NDArray[np.int32]]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.where(s >= 0, s + start, -1) for s, start in zip(spans, first[:-1], strict=True)])).to(device)

    return Spans(span_N=numbered([r.span_R for r in readings]), span_Q=numbered([r.span_Q for r in readings]), count=int(first[-1]))


def _row(readings: Sequence[Reading], device: torch.device) -> Row:
    lengths = [len(r.tokens) - r.prompt_length for r in readings]
    samples = [
        Sample(
            sample_id="",
            group_id="",
            tokens=r.tokens,
            prompt_length=r.prompt_length,
            loss_mask=np.ones(length, np.bool_),
            logprobs=np.zeros(length, np.float32),
            weight_versions=np.zeros(length, np.int32),
            status=Status.COMPLETED,
        )
        for r, length in zip(readings, lengths, strict=True)
    ]
    return row_of(MicroBatch(packed=pack(samples), indices=()), None, device)


def _joined(parts: Sequence[NDArray[Any] | None], device: torch.device) -> Tensor | None:
    told = [part for part in parts if part is not None]
    return torch.from_numpy(np.concatenate(told)).to(device) if told else None
