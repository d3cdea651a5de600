"""Batch-invariant operators inside an SGLang server on CPU, so that its log-probs equal the trainer's bit for bit.

`install` is called in each of the server's processes through SGLang's plugin entry point (see `scripts/sglang_cpu/shims`) when
`model.true_on_policy` is set. Operators of a dense float32 model are replaced by those of `miles.core.model.batch_invariant`, that is
by the very functions that the trainer runs: linear layers (a fused one as the separate products it stands for), SiLU, attention over
SGLang's paged cache, the output head and the log-probability. RMSNorm, rotary embedding and embedding already give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles.core.model.batch_invariant import KEYS, QUERY_ROWS, InvariantSiLU, attend_tile, check_window, key_tiles_of, linear, queries_of, query_tiles_of
from miles.core.model.token_softmax import softmax_parts


def install() -> None:
    """Replace SGLang's operators. Before any model is made."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.sampler import Sampler

    _install_linear(UnquantizedLinearMethod)
    SiluAndMul.forward_native = _silu_and_mul
    LogitsProcessor._compute_lm_head = _head
    TorchNativeAttnBackend._run_sdpa_forward_extend = _extend
    TorchNativeAttnBackend._run_sdpa_forward_decode = _decode
    _install_logprobs(Sampler, OutputLogprobProcessor)


def attend(query_QHE: Tensor, key_LGE: Tensor, value_LGE: Tensor, first: int, scaling: float) -> Tensor:
    """Causal attention of the queries at positions `first`, `first + 1`, ... of one sequence over its L keys, [Q, H, E]."""
    count, heads, _ = query_QHE.shape
    groups = key_LGE.shape[1]
    shared = heads // groups
    query_SBQE = query_tiles_of(query_QHE[None], groups, scaling)
    keys_KBET, values_KBTE = key_tiles_of(key_LGE[None]).transpose(2, 3).contiguous(), key_tiles_of(value_LGE[None])
    key_at_T = torch.arange(len(keys_KBET) * KEYS)
    output_SBQE = torch.empty_like(query_SBQE)
    for place, query_BQE in enumerate(query_SBQE):
        position_Q = first + torch.arange(place * QUERY_ROWS, (place + 1) * QUERY_ROWS) // shared
        seen = min(int(position_Q[-1]), first + count - 1) // KEYS + 1
        mask_QT = torch.where(key_at_T[: seen * KEYS] > position_Q[:, None], -torch.inf, 0.0)
        mask_KBQT = mask_QT.unflatten(1, (seen, 1, KEYS)).permute(1, 2, 0, 3)
        output_SBQE[place] = attend_tile(query_BQE, keys_KBET[:seen], values_KBTE[:seen], mask_KBQT)
    return queries_of(output_SBQE, 1, count, heads)[0]


def _install_linear(method: Any) -> None:
    create_weights = method.create_weights

    def remember_parts(self: Any, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], *args: Any, **kwargs: Any) -> None:
        create_weights(self, layer, input_size_per_partition, output_partition_sizes, *args, **kwargs)
        layer.separate_sizes = list(output_partition_sizes)

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.flatten(0, -2)
        # A product rounds by the shape of its call: three projections fused into one call would give other bits.
        output = torch.cat([linear(rows, weight) for weight in layer.weight.split(layer.separate_sizes)], -1).unflatten(0, x.shape[:-1])
        return output if bias is None else output + bias

    method.create_weights, method.apply = remember_parts, apply


def _silu_and_mul(self: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return InvariantSiLU()(gate.contiguous()) * up


def _head(self: Any, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Without the rows that SGLang pads the vocabulary with, which the trainer does not have."""
    assert embedding_bias is None, "the trainer refuses a biased head"
    return linear(hidden_states, lm_head.weight[: self.config.vocab_size])


def _extend(
    self: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_prefix_lens: Tensor,
    extend_seq_lens: Tensor,
    *args: Any,
    scaling: float,
    sliding_window_size: int | None = None,
    **kwargs: Any,
) -> Tensor:
    _check_window(sliding_window_size, seq_lens)
    start = 0
    for request, length, prefix, count in zip(*(x.tolist() for x in (req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens)), strict=True):
        tokens = req_to_token[request, :length].long()
        output[start : start + count] = attend(query[start : start + count], k_cache[tokens], v_cache[tokens], prefix, scaling)
        start += count
    return output


def _decode(
    self: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    *args: Any,
    scaling: float,
    sliding_window_size: int | None = None,
    **kwargs: Any,
) -> Tensor:
    _check_window(sliding_window_size, seq_lens)
    for row, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        tokens = req_to_token[request, :length].long()
        output[row] = attend(query[row : row + 1], k_cache[tokens], v_cache[tokens], length - 1, scaling)[0]
    return output


def _check_window(size: int | None, seq_lens: Tensor) -> None:
    """SGLang counts the keys before a query, and -1 is no window."""
    if size is not None and size >= 0:
        check_window(size + 1, int(seq_lens.max()))


def _install_logprobs(sampler: Any, processor: Any) -> None:
    """The logits are kept between the sampler's first step, which sees them before it overwrites them, and the one that scores them."""
    preprocess, compute = sampler._preprocess_logits, processor.compute_logprobs

    def keep_logits(self: Any, logits: Tensor, sampling_info: Any) -> Tensor:
        logits = preprocess(self, logits, sampling_info)
        scaled = logits / sampling_info.temperatures
        self.output_logprob_processor.exact_logprobs = scaled - softmax_parts(scaled)[1][:, None]
        return logits

    def compute_exactly(self: Any, logprobs: Tensor, *args: Any, **kwargs: Any) -> Any:
        return compute(self, self.exact_logprobs, *args, **kwargs)

    sampler._preprocess_logits, processor.compute_logprobs = keep_logits, compute_exactly
