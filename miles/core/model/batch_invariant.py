"""Operators whose result for a row is the same, bit for bit, whatever other rows are computed beside it.

A plain float32 matrix product rounds differently when the number of rows changes, so an engine that decodes token by token
and a trainer that scores whole sequences disagree in the last bits. Here every product is made of calls of one fixed shape:
linears take 32 rows at a time, attention 8 query rows by 32 keys. What remains (norms, rotary embedding, softmax over the
vocabulary, residuals) is computed row by row in torch already; `tests/core/model/test_batch_invariant.py` holds all of it to that.

The backward uses the plain operators: it happens on the trainer's side alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from miles.core.model.packed import PackedRows, output_head, use_packed_attention

LINEAR_ROWS = 32
QUERY_ROWS = 8
KEYS = 32


def make_batch_invariant(model: PreTrainedModel) -> None:
    """Replace linears, activations and attention of a float32 causal language model in place, before `fully_shard`.

    Parameters stay the same objects under the same names. Idempotent.

    Raises:
        ValueError: a module has no batch-invariant version, or the model is not float32. The message names it.
    """
    if is_batch_invariant(model):
        return
    if model.dtype != torch.float32:
        raise ValueError(f"batch-invariant operators are float32, but the model is {model.dtype}: set model.dtype = 'float32'")
    head = output_head(model)
    for name, module in list(model.named_modules()):
        replacement = None if module is head else _replacement(name, module)
        if replacement is not None:
            model.set_submodule(name, replacement)
    use_packed_attention(model)
    vars(model).update(batch_invariant_linear=linear, batch_invariant_rows=InvariantRows)


def is_batch_invariant(model: PreTrainedModel) -> bool:
    return hasattr(model, "batch_invariant_rows")


def linear(rows_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """`rows @ weight.T` of 2-D operands, [N, V]."""
    return _Linear.apply(rows_ND, weight_VD)


class InvariantLinear(nn.Linear):
    """Stands in for an `nn.Linear` and shares its parameters."""

    def __init__(self, source: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight, self.bias = source.weight, source.bias

    def forward(self, input: Tensor) -> Tensor:
        output = linear(input.flatten(0, -2), self.weight).unflatten(0, input.shape[:-1])
        return output if self.bias is None else output + self.bias


class InvariantSiLU(nn.Module):
    """x / (1 + exp(-x)). torch's own kernel uses another exp for the last few elements of a buffer than for the rest."""

    def forward(self, input: Tensor) -> Tensor:
        return _SiLU.apply(input)


class InvariantRows(PackedRows):
    """Packed rows whose attention runs over fixed tiles in the forward."""

    def attend(self, layer: int, query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, scaling: float, dropout: float, window: int | None) -> Tensor:
        check_window(window, max(self.lengths))
        return _Attention.apply(query_THE, key_TGE, value_TGE, self, scaling)

    def attend_tiles(self, query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, scaling: float) -> Tensor:
        """As `PackedRows.attend`, without a graph: each query attends through `attend_tile`."""
        if self.gather_M is not None:
            query_THE, key_TGE, value_TGE = (x.index_select(0, self.gather_M) for x in (query_THE, key_TGE, value_TGE))
        outputs, start = [], 0
        for rows, length in self.blocks:
            stop = start + rows * length
            query_NLHE, key_NLGE, value_NLGE = (x[start:stop].unflatten(0, (rows, length)) for x in (query_THE, key_TGE, value_TGE))
            outputs.append(attend_block(query_NLHE, key_NLGE, value_NLGE, scaling).flatten(0, 1))
            start = stop
        output_THE = torch.cat(outputs)
        if self.scatter_T is not None:
            output_THE = output_THE.index_select(0, self.scatter_T)
        return output_THE


def attend_tile(query_BQE: Tensor, keys_KBET: Tensor, values_KBTE: Tensor, mask_KBQT: Tensor) -> Tensor:
    """Softmax attention of one tile of scaled queries per batch entry over key tiles, [B, 8, E].

    The maximum is exact, and sums and products run over one key tile at a time, in order. A tile that a row may not see adds
    exactly 0 to it, so it makes no difference how many follow.

    Args:
        query_BQE: [B, 8, E]; rows that stand for nothing may hold anything finite.
        keys_KBET, values_KBTE: K key tiles of 32, keys transposed, each entry contiguous.
        mask_KBQT: broadcastable to [K, B, 8, 32]; -inf where a query may not look, 0 elsewhere. Every row sees a key.
    """
    scores_KBQT = query_BQE.new_empty(len(keys_KBET), len(query_BQE), QUERY_ROWS, KEYS)
    for scores_BQT, keys_BET in zip(scores_KBQT, keys_KBET, strict=True):
        torch.bmm(query_BQE, keys_BET, out=scores_BQT)
    scores_KBQT.add_(mask_KBQT)
    top_BQ1 = scores_KBQT.amax((0, -1)).unsqueeze(-1)
    weights_KBQT = scores_KBQT.sub_(top_BQ1).exp_()
    sums_KBQ1 = weights_KBQT.sum(-1, keepdim=True)
    total_BQ1 = sums_KBQ1[0]
    output_BQE = torch.bmm(weights_KBQT[0], values_KBTE[0])
    for tile in range(1, len(keys_KBET)):
        total_BQ1 = total_BQ1 + sums_KBQ1[tile]
        output_BQE += torch.bmm(weights_KBQT[tile], values_KBTE[tile])
    return output_BQE.div_(total_BQ1)


def check_window(window: int | None, length: int) -> None:
    """Raises ValueError for a sequence that a layer's sliding window would cut."""
    if window is not None and length > window:
        raise ValueError(
            f"a sequence of {length} tokens is longer than the model's sliding window of {window}, which batch-invariant attention does not have: "
            f"set model.context = {window}"
        )


def _replacement(name: str, module: nn.Module) -> nn.Module | None:
    """A batch-invariant stand-in, or None where the module may stay as it is."""
    if isinstance(module, nn.Linear):
        return InvariantLinear(module)
    if isinstance(module, (nn.SiLU, SiLUActivation)):
        return InvariantSiLU()
    if isinstance(module, (nn.ModuleDict, nn.ParameterDict)) and not len(module):
        return None  # an adapter's layer has some for what it does not do
    has_own_parameters = next(module.parameters(recurse=False), None) is not None
    stays = isinstance(module, (nn.Embedding, nn.Identity, nn.Dropout)) or type(module).__name__.endswith(("RMSNorm", "RotaryEmbedding"))
    if not stays and (has_own_parameters or not list(module.children())):
        raise ValueError(f"module {name!r} is a {type(module).__name__}, which has no batch-invariant version: set model.true_on_policy = false")
    return None


def _tiled_product(rows_ND: Tensor, weight_VD: Tensor) -> Tensor:
    count = len(rows_ND)
    tiles = max(1, -(-count // LINEAR_ROWS))
    if count != tiles * LINEAR_ROWS:
        rows_ND = pad(rows_ND, (0, 0, 0, tiles * LINEAR_ROWS - count))
    tiles_KND = rows_ND.contiguous().unflatten(0, (tiles, LINEAR_ROWS))
    return torch.bmm(tiles_KND, weight_VD.t().expand(tiles, -1, -1)).flatten(0, 1)[:count]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(rows_ND, weight_VD)
        return _tiled_product(rows_ND, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows_ND, weight_VD = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return grads[0] @ weight_VD if wanted[0] else None, grads[0].t() @ rows_ND if wanted[1] else None


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        return input / torch.exp(-input).add_(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (input,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0], input)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: InvariantRows, scaling: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.rows, ctx.scaling = rows, scaling
        return rows.attend_tiles(query, key, value, scaling)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            output = PackedRows.attend(ctx.rows, 0, query, key, value, ctx.scaling, 0.0, None)
        return (*torch.autograd.grad(output, (query, key, value), grads[0]), None, None)


def attend_block(query_NLHE: Tensor, key_NLGE: Tensor, value_NLGE: Tensor, scaling: float, before: int = 0) -> Tensor:
    """Causal attention of N sequences' last L tokens, [N, L, H, E]; keys and values are [N, before + L, G, E]. Without a graph.

    A query tile sees the key tiles up to its last query's.
    """
    count, length, heads, _ = query_NLHE.shape
    groups = key_NLGE.shape[2]
    shared = heads // groups
    query_tiles = query_tiles_of(query_NLHE, groups, scaling)
    keys_KBET, values_KBTE = key_tiles_of(key_NLGE).transpose(2, 3).contiguous(), key_tiles_of(value_NLGE)
    key_at_T = torch.arange(len(keys_KBET) * KEYS, device=query_NLHE.device)
    output_SBQE = torch.empty_like(query_tiles)
    for place, query_BQE in enumerate(query_tiles):
        position_Q = before + torch.arange(place * QUERY_ROWS, (place + 1) * QUERY_ROWS, device=query_NLHE.device) // shared
        last = before + min(((place + 1) * QUERY_ROWS - 1) // shared, length - 1)
        seen = last // KEYS + 1
        mask_QT = torch.where(key_at_T[: seen * KEYS] > position_Q[:, None], -torch.inf, 0.0)
        mask_KBQT = mask_QT.unflatten(1, (seen, 1, KEYS)).permute(1, 2, 0, 3)
        output_SBQE[place] = attend_tile(query_BQE, keys_KBET[:seen], values_KBTE[:seen], mask_KBQT)
    return queries_of(output_SBQE, count, length, heads)


def query_tiles_of(query_NLHE: Tensor, groups: int, scaling: float) -> Tensor:
    """Scaled queries by tiles, [S, N * G, 8, E]. The heads that share keys follow each other, so that they share a tile too."""
    query_NGRE = (query_NLHE * scaling).unflatten(2, (groups, -1)).transpose(1, 2).flatten(2, 3)
    query_NGRE = pad(query_NGRE, (0, 0, 0, -query_NGRE.shape[2] % QUERY_ROWS))
    return query_NGRE.unflatten(2, (-1, QUERY_ROWS)).permute(2, 0, 1, 3, 4).flatten(1, 2).contiguous()


def queries_of(tiles_SBQE: Tensor, count: int, length: int, heads: int) -> Tensor:
    """The inverse of `query_tiles_of`: [N, L, H, E]."""
    rows_NGRE = tiles_SBQE.unflatten(1, (count, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)
    groups = rows_NGRE.shape[1]
    return rows_NGRE[:, :, : length * heads // groups].unflatten(2, (length, -1)).transpose(1, 2).flatten(2, 3)


def key_tiles_of(key_NLGE: Tensor) -> Tensor:
    """Keys or values by tiles, [K, N * G, 32, E], with zeros behind the last."""
    key_NLGE = pad(key_NLGE, (0, 0, 0, 0, 0, -key_NLGE.shape[1] % KEYS))
    return key_NLGE.unflatten(1, (-1, KEYS)).permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()
