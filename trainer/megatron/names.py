"""The name-and-slice map: which part of which Hugging Face tensor lies where in which tensor of a Megatron rank.

Import, export, weight sync and `miles convert` read the same map. Pure arithmetic: no torch, no Megatron-Core.

Megatron keeps query, key and value of one group of heads together (q q k v | q q k v ...), and gate above up within each tensor
rank's share, so one of its tensors is several blocks of several Hugging Face tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from miles.core.model.config import LoraConfig
from trainer.megatron.architecture import Adapters, Architecture
from trainer.megatron.layout import Layout
from weight_sync.slices import Block, Range


@dataclass(frozen=True)
class Part:
    """One tensor of a rank. What no block covers is padding: zeros.

    Attributes:
        sharded: its dimension that is divided over tensor ranks; None where each has the whole.
        stride: pieces that lie end to end in that dimension (gate and up: 2).
        expert: it belongs to an expert. copy: of another stage's tensor (a tied output head); it is never exported.
        buffer: it is never trained, and is float32 whatever the model is.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    sharded: int | None = None
    stride: int = 1
    expert: bool = False
    buffer: bool = False
    copy: bool = False


@dataclass(frozen=True)
class Held:
    """Where a block can be fetched: chunk and tensor name on `rank`."""

    rank: int
    chunk: int
    tensor: str
    block: Block


def layers_of(architecture: Architecture, layout: Layout, stage: int, chunk: int) -> range:
    """Numbers, in the whole model, of the layers in one chunk of a stage: chunks go round the stages."""
    size = architecture.layers // (layout.pipeline * layout.chunks)
    start = (chunk * layout.pipeline + stage) * size
    return range(start, start + size)


def parts(architecture: Architecture, layout: Layout, rank: int) -> list[dict[str, Part]]:
    """The tensors of `rank` by the names that Megatron-Core gives them, one dict a chunk. Where the architecture is that of adapters: these alone."""
    adapters = architecture.adapters
    chunks = [_chunk(architecture, layout, rank, chunk) for chunk in range(layout.chunks)]
    return [dict(chunk if adapters is None else _adapters(chunk, adapters)) for chunk in chunks]


def shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face checkpoint and its shape, layer by layer; tied ones once."""
    whole = parts(architecture, Layout(), 0)[0]
    found: dict[str, tuple[int, ...]] = {}
    for part in whole.values():
        for block in part.blocks:
            before = found.get(block.name, (0,) * len(block.there))
            found[block.name] = tuple(max(size, stop) for size, (_, stop) in zip(before, block.there, strict=True))
    return found


def adapters_of(architecture: Architecture, lora: LoraConfig) -> Architecture:
    """Of the tensors that are trained in place of those of `architecture`.

    Raises:
        ValueError: DoRA, experts, or a target that the model does not have.
    """
    if lora.dora or architecture.experts:
        what = "lora.dora = true" if lora.dora else "[lora] on a model with experts"
        raise ValueError(f"{what} is not there for trainer.backend = 'megatron': use trainer.backend = 'fsdp'")
    known = {name.split(".")[-3] for name in shapes(replace(architecture, adapters=Adapters(lora.rank)))}
    for target in lora.targets:
        if target not in known:
            raise ValueError(f"lora.targets has {target!r}, which is no linear layer of the model; there are {', '.join(sorted(known))}")
    return replace(architecture, adapters=Adapters(lora.rank, tuple(lora.targets)))


def buffers(architecture: Architecture) -> set[str]:
    """Hugging Face names of what is never trained."""
    return {block.name for part in parts(architecture, Layout(), 0)[0].values() if part.buffer for block in part.blocks}


def holders(architecture: Architecture, layout: Layout) -> dict[str, list[Held]]:
    """For every Hugging Face tensor the blocks that make it up, each once, with the first rank that has it."""
    found: dict[str, list[Held]] = {name: [] for name in shapes(architecture)}
    for rank in range(layout.ranks):
        for name, held in held_by(architecture, layout, rank, first=True).items():
            found[name] += held
    return found


def held_by(architecture: Architecture, layout: Layout, rank: int, *, first: bool = False) -> dict[str, list[Held]]:
    """What `rank` holds of each Hugging Face tensor; with `first` only where no data-parallel copy comes before it. What tensor ranks hold
    whole counts for the first of them."""
    place = layout.place(rank)
    found: dict[str, list[Held]] = {}
    for chunk, tensors in enumerate(parts(architecture, layout, rank)):
        for tensor, part in tensors.items():
            if part.copy or (first and (place.expert_data if part.expert else place.data)) or (part.sharded is None and not part.expert and place.tensor):
                continue
            for block in part.blocks:
                found.setdefault(block.name, []).append(Held(rank, chunk, tensor, block))
    return found


def _chunk(architecture: Architecture, layout: Layout, rank: int, chunk: int) -> Iterator[tuple[str, Part]]:
    place = layout.place(rank)
    first = place.stage == 0 and chunk == 0
    last = place.stage == layout.pipeline - 1 and chunk == layout.chunks - 1
    if first:
        yield "embedding.word_embeddings.weight", _vocabulary("model.embed_tokens.weight", architecture, layout, place.tensor)
    for local, layer in enumerate(layers_of(architecture, layout, place.stage, chunk)):
        for name, part in _layer(architecture, layout, rank, layer):
            yield f"decoder.layers.{local}.{name}", part
    if last:
        yield "decoder.final_layernorm.weight", _whole("model.norm.weight", (architecture.hidden,))
        if architecture.values:
            head = (1, architecture.hidden)
            yield "output_layer.weight", _whole("score.weight", head) if architecture.trained_values else Part(head, ())
        elif not architecture.tied:
            yield "output_layer.weight", _vocabulary("lm_head.weight", architecture, layout, place.tensor)
        elif not first:
            yield "output_layer.weight", _vocabulary("model.embed_tokens.weight", architecture, layout, place.tensor, copy=True)


def _adapters(tensors: Iterable[tuple[str, Part]], adapters: Adapters) -> Iterator[tuple[str, Part]]:
    """A and B of each Hugging Face weight that lies in a linear layer. What comes in divided has A divided, what goes out divided has B so."""
    for name, part in tensors:
        if part.sharded is None or ".layers." not in name or not name.endswith(".weight"):
            continue
        for weight in dict.fromkeys(block.name for block in part.blocks):
            layer = weight.removesuffix(".weight")
            leaf = layer.rpartition(".")[2]
            if adapters.targets and leaf not in adapters.targets:
                continue
            held = [block.there for block in part.blocks if block.name == weight]
            rows, columns = ((min(there[d][0] for there in held), max(there[d][1] for there in held)) for d in (0, 1))
            inner, here, there = (0, adapters.rank), f"{name.removesuffix('.weight')}.adapter.{leaf}", f"base_model.model.{layer}"
            yield f"{here}.lora_A", _rectangle(f"{there}.lora_A.weight", (inner, columns), 1 if part.sharded == 1 else None)
            yield f"{here}.lora_B", _rectangle(f"{there}.lora_B.weight", (rows, inner), 0 if part.sharded == 0 else None)


def _rectangle(name: str, there: tuple[Range, ...], sharded: int | None) -> Part:
    shape = tuple(stop - start for start, stop in there)
    return Part(shape, (Block(name, there, tuple((0, size) for size in shape)),), sharded=sharded)


def _layer(architecture: Architecture, layout: Layout, rank: int, layer: int) -> Iterator[tuple[str, Part]]:
    place, hidden, prefix = layout.place(rank), architecture.hidden, f"model.layers.{layer}."
    yield "input_layernorm.weight", _whole(f"{prefix}input_layernorm.weight", (hidden,))
    attention = _attention if architecture.latent is None else _latent_attention
    for name, part in attention(architecture, layout, place.tensor, f"{prefix}self_attn."):
        yield f"self_attention.{name}", part
    yield "pre_mlp_layernorm.weight", _whole(f"{prefix}post_attention_layernorm.weight", (hidden,))
    if architecture.dense(layer):
        yield from _mlp("mlp.", f"{prefix}mlp.", hidden, architecture.feed_forward, layout.tensor, place.tensor)
        return
    yield "mlp.router.weight", _whole(f"{prefix}mlp.gate.weight", (architecture.experts, hidden))
    if architecture.biased_routing:
        yield "mlp.router.expert_bias", replace(_whole(f"{prefix}mlp.gate.e_score_correction_bias", (architecture.experts,)), buffer=True)
    share = architecture.experts // layout.expert
    for local in range(share):
        there = f"{prefix}mlp.experts.{place.expert * share + local}."
        yield from _mlp(f"mlp.experts.local_experts.{local}.", there, hidden, architecture.expert_width, 1, 0, expert=True)
    if architecture.shared_width:
        yield from _mlp("mlp.shared_experts.", f"{prefix}mlp.shared_experts.", hidden, architecture.shared_width, layout.tensor, place.tensor)


def _attention(architecture: Architecture, layout: Layout, rank: int, there: str) -> Iterator[tuple[str, Part]]:
    width = architecture.head_width
    yield "linear_qkv.weight", _qkv(there, "weight", architecture, layout, rank)
    if architecture.qkv_bias:
        yield "linear_qkv.bias", _qkv(there, "bias", architecture, layout, rank)
    if architecture.head_norm:
        yield "q_layernorm.weight", _whole(f"{there}q_norm.weight", (width,))
        yield "k_layernorm.weight", _whole(f"{there}k_norm.weight", (width,))
    yield "linear_proj.weight", _columns(f"{there}o_proj.weight", architecture.hidden, architecture.heads * width, layout.tensor, rank)


def _latent_attention(architecture: Architecture, layout: Layout, rank: int, there: str) -> Iterator[tuple[str, Part]]:
    latent, heads, hidden = architecture.latent, architecture.heads, architecture.hidden
    assert latent is not None
    rows = partial(_rows, ranks=layout.tensor, rank=rank)
    if latent.query_rank is None:
        yield "linear_q_proj.weight", rows(f"{there}q_proj.weight", heads * architecture.head_width, hidden)
    else:
        yield "linear_q_down_proj.weight", rows(f"{there}q_a_proj.weight", latent.query_rank, hidden)
        yield "linear_q_up_proj.weight", rows(f"{there}q_b_proj.weight", heads * architecture.head_width, latent.query_rank)
        yield "q_layernorm.weight", _whole(f"{there}q_a_layernorm.weight", (latent.query_rank,))
    yield "linear_kv_down_proj.weight", rows(f"{there}kv_a_proj_with_mqa.weight", latent.rank + latent.rotary, hidden)
    yield "linear_kv_up_proj.weight", rows(f"{there}kv_b_proj.weight", heads * (latent.plain + latent.value), latent.rank)
    yield "kv_layernorm.weight", _whole(f"{there}kv_a_layernorm.weight", (latent.rank,))
    yield "linear_proj.weight", _columns(f"{there}o_proj.weight", hidden, heads * latent.value, layout.tensor, rank)


def _mlp(here: str, there: str, hidden: int, width: int, ranks: int, rank: int, expert: bool = False) -> Iterator[tuple[str, Part]]:
    size = width // ranks
    rows, own = (rank * size, (rank + 1) * size), (0, hidden)
    blocks = tuple(Block(f"{there}{name}.weight", (rows, own), ((at * size, (at + 1) * size), own)) for at, name in enumerate(("gate_proj", "up_proj")))
    yield f"{here}linear_fc1.weight", Part((2 * size, hidden), blocks, sharded=0, stride=2, expert=expert)
    block = Block(f"{there}down_proj.weight", (own, rows), (own, (0, size)))
    yield f"{here}linear_fc2.weight", Part((hidden, size), (block,), sharded=1, expert=expert)


def _qkv(there: str, kind: str, architecture: Architecture, layout: Layout, rank: int) -> Part:
    """Groups of heads over tensor ranks; in each group its queries, then its key, then its value."""
    width, groups = architecture.head_width, architecture.kv_heads // layout.tensor
    queries = architecture.heads // architecture.kv_heads * width
    rest: tuple[Range, ...] = ((0, architecture.hidden),) if kind == "weight" else ()
    blocks, at = [], 0
    for group in range(rank * groups, (rank + 1) * groups):
        for name, size in (("q_proj", queries), ("k_proj", width), ("v_proj", width)):
            blocks.append(Block(f"{there}{name}.{kind}", ((group * size, (group + 1) * size), *rest), ((at, at + size), *rest)))
            at += size
    return Part((at, *(stop for _, stop in rest)), tuple(blocks), sharded=0)


def _rows(name: str, rows: int, columns: int, ranks: int, rank: int) -> Part:
    size = rows // ranks
    block = Block(name, ((rank * size, (rank + 1) * size), (0, columns)), ((0, size), (0, columns)))
    return Part((size, columns), (block,), sharded=0)


def _columns(name: str, rows: int, columns: int, ranks: int, rank: int) -> Part:
    size = columns // ranks
    block = Block(name, ((0, rows), (rank * size, (rank + 1) * size)), ((0, rows), (0, size)))
    return Part((rows, size), (block,), sharded=1)


def _vocabulary(name: str, architecture: Architecture, layout: Layout, rank: int, copy: bool = False) -> Part:
    """Rows over tensor ranks; the last ranks may hold padding, or nothing else."""
    share, columns = architecture.vocabulary_share(layout), (0, architecture.hidden)
    start, stop = rank * share, min((rank + 1) * share, architecture.vocabulary)
    blocks = (Block(name, ((start, stop), columns), ((0, stop - start), columns)),) if start < stop else ()
    return Part((share, architecture.hidden), blocks, sharded=0, copy=copy)


def _whole(name: str, shape: tuple[int, ...]) -> Part:
    ranges = tuple((0, size) for size in shape)
    return Part(shape, (Block(name, ranges, ranges),))
