"""The name-and-slice map of SGLang: which part of which checkpoint tensor lies where in a parameter of one of its tensor-parallel ranks.

SGLang lays query, key and value of a rank's heads end to end, gate above up, all experts of a layer into two tensors, and fills the
vocabulary up with rows of its own. Heads of keys and values that are fewer than the ranks are there several times. Pure arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from rollout.engines.sglang_served import VOCABULARY_TILE
from weight_sync.contracts import TensorSpec
from weight_sync.slices import Block, Range, full

_PLACE = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2), "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_VOCABULARY = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.weight")


@dataclass
class Parameter:
    """One parameter of a rank. What no block covers is padding."""

    shape: tuple[int, ...]
    blocks: list[Block] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return prod(self.shape)


def rank_parameters(specs: Mapping[str, TensorSpec], kv_heads: int, ranks: int, rank: int) -> dict[str, Parameter]:
    """The parameters of tensor-parallel `rank` of `ranks`, in the order of the checkpoint's tensors.

    Raises:
        ValueError: a tensor does not divide over the ranks.
    """
    found: dict[str, Parameter] = {}
    experts: dict[str, int] = {}
    for name in specs:
        if match := _EXPERT.fullmatch(name):
            experts[match[1]] = max(experts.get(match[1], 0), int(match[2]) + 1)
    for name, spec in specs.items():
        if match := _EXPERT.fullmatch(name):
            _expert(found, spec, match[1], int(match[2]), match[3], experts[match[1]], ranks, rank)
        elif (match := re.fullmatch(r"(.*\.)(\w+_proj)\.(weight|bias)", name)) and match[2] in _PLACE:
            merged, number = _PLACE[match[2]]
            rows = _heads(spec, kv_heads, ranks, rank) if number and merged == "qkv_proj" else _share(spec, 0, ranks, rank)
            _append(found, f"{match[1]}{merged}.{match[3]}", spec, rows)
        elif re.fullmatch(r".*\.(o_proj|down_proj)\.weight", name):
            columns = _share(spec, 1, ranks, rank)
            rows = (0, spec.shape[0])
            found[name] = Parameter((rows[1], columns[1] - columns[0]), [Block(name, (rows, columns), (rows, (0, columns[1] - columns[0])))])
        elif _VOCABULARY.fullmatch(name):
            found[name] = _vocabulary(spec, ranks, rank)
        else:
            found[name] = Parameter(spec.shape, [Block(name, full(spec.shape), full(spec.shape))])
    return found


def _append(found: dict[str, Parameter], merged: str, spec: TensorSpec, rows: Range) -> None:
    """The checkpoint's parts of a merged tensor come in the order in which it has them."""
    parameter = found.setdefault(merged, Parameter((0, *spec.shape[1:])))
    start, size = parameter.shape[0], rows[1] - rows[0]
    rest = full(spec.shape[1:])
    parameter.blocks.append(Block(spec.name, (rows, *rest), ((start, start + size), *rest)))
    parameter.shape = (start + size, *spec.shape[1:])


def _expert(found: dict[str, Parameter], spec: TensorSpec, prefix: str, number: int, kind: str, experts: int, ranks: int, rank: int) -> None:
    share = _share(spec, 1 if kind == "down" else 0, ranks, rank)
    size = share[1] - share[0]
    if kind == "down":
        rows = (0, spec.shape[0])
        parameter = found.setdefault(f"{prefix}.w2_weight", Parameter((experts, spec.shape[0], size)))
        parameter.blocks.append(Block(spec.name, (rows, share), ((number, number + 1), rows, (0, size))))
        return
    columns = (0, spec.shape[1])
    parameter = found.setdefault(f"{prefix}.w13_weight", Parameter((experts, 2 * size, spec.shape[1])))
    start = 0 if kind == "gate" else size
    parameter.blocks.append(Block(spec.name, (share, columns), ((number, number + 1), (start, start + size), columns)))


def _vocabulary(spec: TensorSpec, ranks: int, rank: int) -> Parameter:
    rows, columns = spec.shape
    tile = VOCABULARY_TILE if -(-rows // VOCABULARY_TILE) * VOCABULARY_TILE % ranks == 0 else VOCABULARY_TILE * ranks
    share = -(-rows // tile) * tile // ranks
    start, stop = rank * share, min((rank + 1) * share, rows)
    blocks = [Block(spec.name, ((start, stop), (0, columns)), ((0, stop - start), (0, columns)))] if start < stop else []
    return Parameter((share, columns), blocks)


def _heads(spec: TensorSpec, kv_heads: int, ranks: int, rank: int) -> Range:
    if ranks <= kv_heads:
        return _share(spec, 0, ranks, rank)
    return _share(spec, 0, kv_heads, rank // (ranks // kv_heads))


def _share(spec: TensorSpec, dimension: int, ranks: int, rank: int) -> Range:
    size, rest = divmod(spec.shape[dimension], ranks)
    if rest:
        raise ValueError(f"{spec.name} {list(spec.shape)} does not divide over {ranks} tensor-parallel engine ranks in dimension {dimension}")
    return rank * size, (rank + 1) * size
