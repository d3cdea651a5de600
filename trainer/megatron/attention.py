"""What Megatron-Core's own layers lack without Transformer Engine: attention within packed rows, and a norm that knows sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from miles.core.model.packed import PackedRows


@dataclass
class Rows(PackedSeqParams):
    """Where the sequences of a packed row lie, for Megatron-Core's rotary embedding and for `PackedAttention`."""

    rows: PackedRows | None = None


def rows_of(sequence_T: Tensor) -> Rows:
    """Of a row of T tokens; each one's sequence number is in `sequence_T`."""
    rows = PackedRows(sequence_T)
    ends = torch.tensor([0, *rows.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(sequence_T.device)
    longest = max(rows.lengths)
    return Rows(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest, rows=rows)


class PackedAttention(nn.Module):
    """Causal attention within each sequence of a row: query [T, H, E], key and value [T, G, E] of this tensor rank -> [T, H * E]."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        self._layer = layer_number - 1
        self._window: int | None = config.windows[self._layer]
        self._scaling = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, packed_seq_params: Rows, **_: Any) -> Tensor:
        assert packed_seq_params.rows is not None
        scaling = query.shape[-1] ** -0.5 if self._scaling is None else self._scaling
        return packed_seq_params.rows.attend(self._layer, query, key, value, scaling, 0.0, self._window).flatten(1)


class RMSNorm(nn.RMSNorm):
    """torch's, in the dtype of the parameters; Megatron-Core sums its gradient over tensor ranks where each sees a part of the tokens."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: Any):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        if config.sequence_parallel:
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]
