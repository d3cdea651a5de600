"""`miles weights`: which trainer rank holds which slice of which tensor, and where it lies in the engines. Starts nothing, reads no weight."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from miles.config import ConfigError, load
from miles.core.model.load import load_config
from miles.run.explain import KINDS, infer_kind
from miles.run.recipe import RLRecipe
from weight_sync.contracts import TensorSpec
from weight_sync.routes import plan_routes
from weight_sync.slices import Block, Ranges, Slice, full, whole

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One tensor of the export.

    Attributes:
        owners: ranks by the slice that they hold. engine: parameter and rectangle in it, by engine rank.
    """

    spec: TensorSpec
    nbytes: int
    owners: dict[Ranges, list[int]]
    engine: list[tuple[str, Block]]


@dataclass(frozen=True)
class Map:
    """The whole table. `masters`: dtype on the trainer. `sends`: bytes that each trainer rank sends to one engine by `p2p`."""

    masters: str
    rows: list[Row]
    sends: list[int]
    engine_bytes: list[int]


def show(path: str, overrides: Sequence[str]) -> None:
    """Print the table of a recipe. Raises ConfigError where it has no engines, or where its tensors do not divide."""
    kind = infer_kind(path, overrides)
    if not issubclass(KINDS[kind], RLRecipe):
        raise ConfigError(f"{path} is a recipe for `miles {kind}`, which has no engines to bring weights to")
    recipe = load(KINDS[kind], path, overrides).config
    assert isinstance(recipe, RLRecipe)
    console = Console()
    if not console.is_terminal:
        console.width = 240
    for part in render(weight_map(recipe)):
        console.print(part, soft_wrap=isinstance(part, str))


def weight_map(recipe: RLRecipe) -> Map:
    """Raises ConfigError as `show`."""
    try:
        specs, held, places = _trainer(recipe)
        engine = _engine(recipe, specs, places)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    size = {spec.dtype: getattr(torch, spec.dtype).itemsize for spec in specs}
    owners: dict[str, dict[Ranges, list[int]]] = {spec.name: {} for spec in specs}
    for rank, slices in enumerate(held):
        for one in slices:
            owners[one.name].setdefault(one.ranges, []).append(rank)
    rows = [Row(spec, spec.numel * size[spec.dtype], owners[spec.name], [of_rank[spec.name] for of_rank in engine if spec.name in of_rank]) for spec in specs]
    sends = [0] * len(held)
    for route in plan_routes(specs, size, held, [[whole(spec) for spec in specs]]):
        sends[route.source] += route.nbytes
    itemsize = size[specs[0].dtype]
    return Map("float32", rows, sends, [sum(block.numel for _, block in of_rank.values()) * itemsize for of_rank in engine])


def render(found: Map) -> Iterator[Table | str]:
    """Layers and experts that are alike share a line."""
    table = Table("tensor", "shape", "dtype", "bytes", "trainer ranks", "engine's tensor", box=None, pad_edge=False)
    for names, row in _alike(found.rows):
        dtype = row.spec.dtype if row.spec.dtype == found.masters else f"{found.masters} > {row.spec.dtype}"
        table.add_row(names, "x".join(map(str, row.spec.shape)), dtype, f"{row.nbytes:,}", _owners(row), _engine_text(row))
    yield table
    total = sum(row.nbytes for row in found.rows)
    yield f"{len(found.rows)} tensors, {total / MIB:,.2f} MiB; an engine's ranks hold {_mib(found.engine_bytes)} MiB of them"
    yield f"by p2p the trainer's ranks send {_mib(found.sends)} MiB to each engine"


def _mib(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size / MIB:,.2f}" for size in sizes)


def _trainer(recipe: RLRecipe) -> tuple[list[TensorSpec], list[list[Slice]], dict[str, tuple[str, Block]]]:
    """The export, what each rank holds of it, and where each tensor lies in the model as transformers has it."""
    config = load_config(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code)
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    ranks = recipe.trainer.ranks
    if recipe.trainer.backend == "megatron":
        from trainer.megatron.architecture import architecture_of
        from trainer.megatron.layout import layout_of
        from trainer.megatron.names import adapters_of, held_by, shapes

        architecture, layout = architecture_of(config), layout_of(recipe.trainer)
        architecture.check(layout)
        if recipe.served_lora is not None:
            architecture = adapters_of(architecture, recipe.served_lora)
        specs = [TensorSpec(name, shape, recipe.model.dtype) for name, shape in shapes(architecture).items()]
        held = [[one.block.slice for blocks in held_by(architecture, layout, rank).values() for one in blocks] for rank in range(ranks)]
        return specs, held, {spec.name: (spec.name, Block(spec.name, full(spec.shape), full(spec.shape))) for spec in specs}
    from trainer.fsdp.export import AdapterExporter, Exporter

    if recipe.trainer.tensor_parallel > 1:
        raise ValueError(f"trainer.tensor_parallel = {recipe.trainer.tensor_parallel}: which slices fsdp's ranks then hold is not told; use 1, or 'megatron'")
    shards = ranks // recipe.trainer.replicas  # ranks of a replica stand side by side
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=recipe.model.trust_remote_code)
        if recipe.lora is not None:
            from miles.core.model.lora import add_adapters

            add_adapters(model, recipe.lora, seed=0)
    served = recipe.served_lora
    exporter = Exporter(model, dtype, 0) if served is None else AdapterExporter(model, served, dtype, 0)
    return exporter.specs(), [exporter.planned(shards, rank % shards) for rank in range(ranks)], exporter.places()


def _engine(recipe: RLRecipe, specs: Sequence[TensorSpec], places: dict[str, tuple[str, Block]]) -> list[dict[str, tuple[str, Block]]]:
    """By engine rank: the engine's tensor and the block in it, by the checkpoint's name."""
    if recipe.rollout.engine == "torch" or recipe.served_lora is not None:
        return [places]
    from rollout.engines.sglang_layout import rank_parameters

    config = load_config(recipe.model.path, trust_remote_code=recipe.model.trust_remote_code).get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    ranks = int(recipe.rollout.sglang_args.get("tp_size", max(1, recipe.rollout.gpus_per_engine)))
    by_name = {spec.name: spec for spec in specs}
    parameters = [rank_parameters(by_name, kv_heads, ranks, rank) for rank in range(ranks)]
    return [{block.name: (own, block) for own, parameter in of_rank.items() for block in parameter.blocks} for of_rank in parameters]


def _alike(rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """Rows that differ in numbers of their names alone, with a name for all of them: `model.layers.{0-27}.mlp.down_proj.weight`."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        engine = tuple((_pattern(own), block.there, block.here[-len(block.there) :]) for own, block in row.engine)
        owners = tuple((ranges, tuple(ranks)) for ranges, ranks in row.owners.items())
        groups.setdefault((_pattern(row.spec.name), row.spec.shape, row.spec.dtype, owners, engine), []).append(row)
    for group in groups.values():
        numbers = zip(*(map(int, _NUMBER.findall(row.spec.name)) for row in group), strict=True)
        spans = iter([_span(sorted(set(column))) for column in numbers])
        yield _NUMBER.sub(lambda _, spans=spans: next(spans), group[0].spec.name), group[0]  # type: ignore[misc]


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)


def _span(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}-{numbers[-1]}}}"
    return "{" + ",".join(map(str, numbers)) + "}"


def _owners(row: Row) -> str:
    return _shortened([f"{_span(ranks)}{_cut(ranges, row.spec.shape)}" for ranges, ranks in row.owners.items()])


def _engine_text(row: Row) -> str:
    """The parameter's name where it differs from the checkpoint's, and what is where in it, rank by rank."""
    texts = []
    for rank, (own, block) in enumerate(row.engine):
        there, here = _cut(block.there, row.spec.shape), "[" + ",".join(f"{a}:{b}" for a, b in block.here) + "]"
        at = f"{own.rpartition('.')[0].rpartition('.')[2]}.{own.rpartition('.')[2]}{here}" if own != row.spec.name else ""
        texts.append((f"{rank}{there}" if len(row.engine) > 1 else there) + (f" in {at}" if at else "") or "the same")
    return _shortened(texts)


def _cut(ranges: Ranges, shape: Sequence[int]) -> str:
    """Empty for the whole tensor."""
    if prod(stop - start for start, stop in ranges) == prod(shape):
        return ""
    return "[" + ",".join(":" if (start, stop) == (0, size) else f"{start}:{stop}" for (start, stop), size in zip(ranges, shape, strict=True)) + "]"


def _shortened(texts: Sequence[str], most: int = 4) -> str:
    return "  ".join(texts if len(texts) <= most else [*texts[: most - 1], "...", texts[-1]])
