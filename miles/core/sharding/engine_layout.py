"""What a tensor-parallel rank of an engine (SGLang, vLLM) holds of a dense decoder: queries, keys and values end to end, gate above up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

Range = tuple[int, int]

PADDING = 64
"""Rows of the vocabulary are padded to a multiple of it, then divided."""


class Architecture(Protocol):
    """Sizes as the Hugging Face configuration has them."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_width(self) -> int: ...
    @property
    def feed_forward(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def head_norm(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...


@dataclass(frozen=True)
class Block:
    """The rectangle `there` of a checkpoint's tensor `name` is the rectangle `here` of the rank's."""

    name: str
    there: tuple[Range, ...]
    here: tuple[Range, ...]


@dataclass(frozen=True)
class Part:
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


def engine_parts(architecture: Architecture, degree: int, rank: int) -> Mapping[str, Part]:
    """The rank's tensors by name. Where there are fewer heads of keys than ranks, neighbours hold the same one."""
    return dict(_parts(architecture, degree, rank))


def separate_parts(architecture: Architecture, degree: int, rank: int) -> Mapping[str, Part]:
    """As `engine_parts`, but nothing is fused: queries, keys, values, gate and up are tensors of their own, by the checkpoint's names."""
    found = {}
    for name, part in engine_parts(architecture, degree, rank).items():
        for block in part.blocks if len(part.blocks) > 1 else ():
            shape = tuple(stop - start for start, stop in block.here)
            found[block.name] = Part(shape, (Block(block.name, block.there, tuple((0, size) for size in shape)),))
        if len(part.blocks) <= 1:
            found[name] = part
    return found


def _parts(architecture: Architecture, degree: int, rank: int) -> Iterator[tuple[str, Part]]:
    hidden, own = architecture.hidden, (0, architecture.hidden)
    yield "model.embed_tokens.weight", _vocabulary("model.embed_tokens.weight", architecture, degree, rank)
    for layer in range(architecture.layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", _whole(f"{prefix}{name}.weight", hidden)
        attention = f"{prefix}self_attn."
        queries = _share(architecture.heads * architecture.head_width, degree, rank)
        groups = min(degree, architecture.kv_heads)
        keys = _share(architecture.kv_heads * architecture.head_width, groups, rank * groups // degree)
        for kind in ("weight", *(["bias"] if architecture.qkv_bias else [])):
            rest = (own,) if kind == "weight" else ()
            names = [(f"{attention}{p}_proj.{kind}", rows) for p, rows in (("q", queries), ("k", keys), ("v", keys))]
            yield f"{attention}qkv_proj.{kind}", _stacked(names, rest)
        if architecture.head_norm:
            for name in ("q_norm", "k_norm"):
                yield f"{attention}{name}.weight", _whole(f"{attention}{name}.weight", architecture.head_width)
        yield f"{attention}o_proj.weight", _columns(f"{attention}o_proj.weight", hidden, queries)
        inner = _share(architecture.feed_forward, degree, rank)
        yield f"{prefix}mlp.gate_up_proj.weight", _stacked([(f"{prefix}mlp.{n}_proj.weight", inner) for n in ("gate", "up")], (own,))
        yield f"{prefix}mlp.down_proj.weight", _columns(f"{prefix}mlp.down_proj.weight", hidden, inner)
    yield "model.norm.weight", _whole("model.norm.weight", hidden)
    if not architecture.tied:
        yield "lm_head.weight", _vocabulary("lm_head.weight", architecture, degree, rank)


def _share(size: int, degree: int, rank: int) -> Range:
    assert size % degree == 0, f"{size} rows over {degree} ranks"
    return rank * size // degree, (rank + 1) * size // degree


def _stacked(rows: list[tuple[str, Range]], rest: tuple[Range, ...]) -> Part:
    blocks, at = [], 0
    for name, (start, stop) in rows:
        blocks.append(Block(name, ((start, stop), *rest), ((at, at + stop - start), *rest)))
        at += stop - start
    return Part((at, *(stop for _, stop in rest)), tuple(blocks))


def _columns(name: str, rows: int, columns: Range) -> Part:
    size = columns[1] - columns[0]
    return Part((rows, size), (Block(name, ((0, rows), columns), ((0, rows), (0, size))),))


def _vocabulary(name: str, architecture: Architecture, degree: int, rank: int) -> Part:
    padded = -(-architecture.vocabulary // (PADDING * degree)) * PADDING * degree
    start, end = _share(padded, degree, rank)
    stop, own = min(end, architecture.vocabulary), (0, architecture.hidden)
    blocks = (Block(name, ((start, stop), own), ((0, stop - start), own)),) if start < stop else ()
    return Part((end - start, architecture.hidden), blocks)


def _whole(name: str, size: int) -> Part:
    return Part((size,), (Block(name, ((0, size),), ((0, size),)),))
