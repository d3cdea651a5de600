"""Token-by-token decoding with a KV cache, on the modules of the transformers model that trainers use too.

Rows live in slots 0 .. n-1 of a static cache, each at its own length. A row's tokens but the last are written by a packed
prefill; every step then feeds one token of each row, so that all logits come from steps. The embedding, the layers and the final
norm are called directly: transformers' outer forward costs as much as the layers of a small model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as plain_linear
from transformers import PreTrainedModel

from miles.core.model.batch_invariant import InvariantRows, is_batch_invariant
from miles.core.model.kv_cache import KVCache, SlotCache, TiledKVCache
from miles.core.model.lean import lean_layers
from miles.core.model.packed import PackedRows, forward_hidden, output_head, use_packed_attention
from miles.core.model.scoring import scaled_logits

_PREFILL_TOKENS = 8192  # tokens of one packed prefill


class Decoder:
    """Next-token logits of up to `max_rows` rows of at most `context` tokens. All of it runs without autograd.

    Args:
        model: a causal language model; batch-invariant if it was made so.
    Raises:
        ValueError: the architecture computes more around its layers than embedding and norm, or its positions depend on
            the longest sequence beside a row.
    """

    def __init__(self, model: PreTrainedModel, max_rows: int, context: int):
        self.context = context
        self._model = model.requires_grad_(False)
        self._body = _body(model)
        self._head = output_head(model)
        self.exact = is_batch_invariant(model)
        self._linear = getattr(model, "batch_invariant_linear", plain_linear)
        use_packed_attention(model)
        config = model.config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kind = TiledKVCache if self.exact else KVCache
        self.cache: SlotCache = kind(len(self._body.layers), max_rows, config.num_key_value_heads, width, context, model.dtype, model.device)
        self._lean = None if self.exact else lean_layers(self._body)
        self._rotary_CE: tuple[Tensor, ...] = ()
        self._check_body()

    @torch.inference_mode()
    def prefill(self, rows: Sequence[Tensor], slots: Sequence[int]) -> None:
        """Write keys and values of `rows` (int64 [L], L may be 0) into `slots`. Equal rows are computed once."""
        first_slot: dict[bytes, int] = {}
        pending: list[tuple[Tensor, int]] = []
        copies: list[tuple[int, int, int]] = []
        for row, slot in zip(rows, slots, strict=True):
            source = first_slot.setdefault(row.numpy().tobytes(), slot)
            if source != slot:
                copies.append((source, slot, len(row)))
            elif len(row):
                pending.append((row, slot))
        self.cache.reserve(max(slots) + 1, max(len(row) for row in rows))  # of the copies too
        for part in _parts(pending):
            self._prefill_packed(part)
        for source, slot, length in copies:
            self.cache.copy(source, slot, length)

    @torch.inference_mode()
    def step(self, tokens_N: Tensor, positions_N: Tensor) -> Tensor:
        """Feed one token to each of the slots 0 .. N-1, at its position, and return the logits [N, V] of what follows, float32."""
        length = int(positions_N.max()) + 1
        self.cache.reserve(tokens_N.shape[0], length)
        hidden_ND = self._run(tokens_N, positions_N, self.cache.step_rows(positions_N, length))
        return scaled_logits(hidden_ND, self._head.weight, 1.0, self._linear)

    @property
    def bound(self) -> bool:
        """Whether the model's parameters must be written in place: several of them are parts of one product's buffer."""
        return self._lean is not None

    def unbind(self) -> None:
        """Go on with the model's own layers, slower for small models: from here on every parameter's storage may be replaced."""
        self._lean, self._rotary_CE = None, ()

    def weights_changed(self) -> None:
        """Call after the model's parameters changed."""
        if self._lean is not None:
            self._lean.refresh()

    def _prefill_packed(self, part: list[tuple[Tensor, int]]) -> None:
        lengths = [len(row) for row, _ in part]
        counts = torch.tensor(lengths)
        sequence_T = torch.arange(len(part)).repeat_interleave(counts)
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        slots_T = torch.tensor([slot for _, slot in part]).repeat_interleave(counts)
        packed = InvariantRows(sequence_T) if self.exact else PackedRows(sequence_T)
        self._run(torch.cat([row for row, _ in part]), positions_T, self.cache.prefill_rows(packed, slots_T, positions_T))

    def _run(self, tokens_T: Tensor, positions_T: Tensor, rows: Any) -> Tensor:
        """Hidden states [T, D] after the final norm."""
        if self._lean is not None:
            return self._lean(tokens_T, self._rotary(positions_T), rows)
        hidden = self._body.embed_tokens(tokens_T[None])
        rotary = [table_TE[None] for table_TE in self._rotary(positions_T)]
        for layer in self._body.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=None, position_embeddings=rotary, use_cache=False, rows=rows)
        return self._body.norm(hidden)[0]

    def _rotary(self, positions_T: Tensor) -> Sequence[Tensor]:
        """Cosines and sines [T, E] from a table of the cache's capacity, computed with the model's own module."""
        if not self._rotary_CE or self._rotary_CE[0].shape[0] < self.cache.capacity:
            weight = self._head.weight
            every = torch.arange(self.cache.capacity, device=weight.device)
            cosine_CE, sine_CE = (table[0] for table in self._body.rotary_emb(weight, every[None]))
            self._rotary_CE = (cosine_CE, sine_CE) if self._lean is None else self._lean.rotary_table(cosine_CE, sine_CE)
        return [table_CE.index_select(0, positions_T) for table_CE in self._rotary_CE]

    @torch.inference_mode()
    def _check_body(self) -> None:
        """Architectures differ in what they do around their layers: compare with the model's own forward."""
        tokens_T, positions_T = torch.arange(4, device=self._model.device), torch.arange(4, device=self._model.device)
        self.cache.reserve(1, 4)
        own_TD = self._run(tokens_T, positions_T, PackedRows(torch.zeros_like(tokens_T)))
        self.cache.drop()
        model_TD = forward_hidden(self._model, tokens_T, positions_T, torch.zeros_like(tokens_T))
        tolerance = 1e-3 if model_TD.dtype == torch.float32 else 1e-1
        if not (own_TD - model_TD).norm() <= tolerance * model_TD.norm():
            raise ValueError(_unsupported(self._model, "its forward does more than embedding, layers and norm"))


def check_decodable(model: PreTrainedModel) -> None:
    """What can be said of a model without weights. Raises ValueError as `Decoder`, which finds the rest by a forward."""
    _body(model)
    output_head(model)


def _body(model: PreTrainedModel) -> Any:
    body: Any = model.get_decoder()
    missing = [name for name in ("embed_tokens", "layers", "norm", "rotary_emb") if not isinstance(getattr(body, name, None), nn.Module)]
    if missing:
        raise ValueError(_unsupported(model, f"it has no {missing[0]}"))
    if getattr(body.rotary_emb, "rope_type", "default") in ("dynamic", "longrope"):
        raise ValueError(_unsupported(model, f"its rotary embedding ({body.rotary_emb.rope_type}) depends on the longest sequence beside a row"))
    return body


def _unsupported(model: PreTrainedModel, reason: str) -> str:
    return f"the torch engine cannot decode {type(model).__name__}: {reason}; use rollout.engine = 'sglang'"


def _parts(pending: list[tuple[Tensor, int]]) -> Iterator[list[tuple[Tensor, int]]]:
    """Rows in order, by at most _PREFILL_TOKENS tokens (or one longer row) at a time."""
    part: list[tuple[Tensor, int]] = []
    tokens = 0
    for row, slot in pending:
        if part and tokens + len(row) > _PREFILL_TOKENS:
            yield part
            part, tokens = [], 0
        part.append((row, slot))
        tokens += len(row)
    if part:
        yield part
