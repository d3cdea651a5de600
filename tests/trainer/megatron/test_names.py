"""The name-and-slice map: every element of a checkpoint lies somewhere exactly once, and every rank's tensor is full of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import DeepseekV3Config

from miles.core.model.config import LoraConfig
from trainer.config import TrainerConfig
from trainer.megatron.architecture import Architecture, architecture_of
from trainer.megatron.deepseek import Latent
from trainer.megatron.layout import Layout, layout_of
from trainer.megatron.names import Part, adapters_of, holders, layers_of, parts, shapes
from trainer.megatron.plan import describe

DENSE = Architecture(
    family="qwen3", layers=4, hidden=8, heads=4, kv_heads=2, head_width=2, feed_forward=12, vocabulary=70, tied=False, norm_epsilon=1e-6,
    windows=(None,) * 4, head_norm=True,
)  # fmt: skip
MOE = replace(DENSE, family="qwen3_moe", experts=4, experts_per_token=2, expert_width=6)
LATENT = replace(
    MOE, family="deepseek_v3", kv_heads=4, head_norm=False, dense_layers=1, shared_width=8, biased_routing=True,
    latent=Latent(query_rank=6, rank=4, plain=2, rotary=2, value=3),
)  # fmt: skip
LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(data=2, tensor=2, pipeline=2),
    Layout(pipeline=2, chunks=2),
    Layout(data=4, expert=2),
    Layout(data=2, tensor=2, expert=4),
]


def filled(shape: tuple[int, ...], ranges: list[tuple[tuple[int, int], ...]]) -> np.ndarray:
    """How often each element of a tensor is covered."""
    counts = np.zeros(shape, np.int64)
    for one in ranges:
        counts[tuple(slice(*r) for r in one)] += 1
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", [DENSE, replace(DENSE, tied=True), MOE, LATENT, replace(DENSE, family="qwen2", qkv_bias=True, head_norm=False)])
def test_every_element_of_a_checkpoint_is_held_once(architecture: Architecture, layout: Layout) -> None:
    if layout.expert > 1 and not architecture.experts:
        return
    for name, shape in shapes(architecture).items():
        counts = filled(shape, [held.block.there for held in holders(architecture, layout)[name]])
        assert counts.min() == counts.max() == 1, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("architecture", [MOE, LATENT])
def test_every_element_of_a_rank_is_filled_once(architecture: Architecture, layout: Layout) -> None:
    """But for the vocabulary's padding."""
    for rank in range(layout.ranks):
        for chunk in parts(architecture, layout, rank):
            for name, part in chunk.items():
                counts = filled(part.shape, [block.here for block in part.blocks])
                if "embeddings" in name or name == "output_layer.weight":
                    assert counts.max(initial=0) <= 1
                else:
                    assert counts.min() == counts.max() == 1, name


def test_queries_keys_and_values_of_a_group_lie_together() -> None:
    """Tensor rank 1 of 2 has the second of two groups: queries 2 and 3, key 1, value 1, each two rows wide."""
    part = parts(DENSE, Layout(tensor=2), 1)[0]["decoder.layers.0.self_attention.linear_qkv.weight"]
    found = [(b.name.rpartition(".self_attn.")[2], b.there[0], b.here[0]) for b in part.blocks]
    assert found == [("q_proj.weight", (4, 8), (0, 4)), ("k_proj.weight", (2, 4), (4, 6)), ("v_proj.weight", (2, 4), (6, 8))]


def test_a_vocabulary_that_does_not_divide_is_padded_on_the_last_ranks() -> None:
    """70 tokens over 2 ranks in multiples of 64: 64 on the first, 6 and padding on the second."""
    found: list[Part] = [parts(DENSE, Layout(tensor=2), rank)[0]["output_layer.weight"] for rank in (0, 1)]
    assert [part.shape for part in found] == [(64, 8), (64, 8)]
    assert [part.blocks[0].there[0] for part in found] == [(0, 64), (64, 70)]


def test_interleaved_stages_take_turns() -> None:
    layout = Layout(pipeline=2, chunks=2)
    assert [[list(layers_of(DENSE, layout, stage, chunk)) for chunk in (0, 1)] for stage in (0, 1)] == [[[0], [2]], [[1], [3]]]


def test_ranks_are_numbered_with_tensor_fastest_and_stages_slowest() -> None:
    layout = Layout(data=2, tensor=2, pipeline=2)
    assert [(p.tensor, p.data, p.stage) for p in map(layout.place, range(8))] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 3, "tensor_parallel": 2}, "trainer.ranks = 3 does not divide by .* 2 x 1 = 2: .* use 2 or 4 ranks"),
        ({"ranks": 4, "expert_parallel": 3}, "expert_parallel = 3 does not divide the 4 ranks"),
        ({"ranks": 2, "pipeline_parallel": 2, "pipeline_chunks": 2}, "pipeline_chunks = 2 needs .* at least 3, not 2"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of(TrainerConfig(backend="megatron", **options))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tensor=8), "4 attention heads do not divide by trainer.tensor_parallel = 8: 4 / 8 = 0.50"),
        (Layout(tensor=4), "2 key-value heads do not divide by trainer.tensor_parallel = 4"),
        (Layout(pipeline=3), "4 layers do not divide by .* = 3: 4 / 3 = 1.33"),
        (Layout(data=2, expert=2), "expert_parallel = 2, but the model .* has no experts"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(layout: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DENSE.check(layout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_interleave": False}, "rope_interleave = False"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False"),
        ({"num_experts_per_tok": 6, "topk_group": 2}, "ranks a group by its 3 best experts .* transformers by 2"),
        ({"first_k_dense_replace": 61}, "leaves no layer with experts"),
    ],
)
def test_a_deepseek_that_would_route_or_turn_otherwise_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        architecture_of(DeepseekV3Config(**options))


def test_the_whole_deepseek_v3_is_known() -> None:
    """671B parameters, as its report says (arXiv 2412.19437), but for the layer that predicts a second token."""
    architecture = architecture_of(DeepseekV3Config())
    assert sum(math.prod(shape) for shape in shapes(architecture).values()) == pytest.approx(671.0e9, rel=1e-3)
    architecture.check(Layout(data=8, tensor=8, expert=64))


def test_memory_of_a_rank_with_adapters_is_the_weights_and_sixteen_bytes_of_each_adapters_parameter() -> None:
    """4 layers of hidden 8, 4 heads and 2 groups 2 wide, 12 columns; adapters of rank 1 on q_proj [8, 8]: 16 parameters a layer."""
    config = TrainerConfig(backend="megatron", ranks=1)
    frozen = sum(math.prod(shape) for shape in shapes(DENSE).values()) + (128 - 70) * 2 * 8  # padding of the vocabulary
    (line,) = [
        line for line in describe(config, DENSE, bfloat16=False, adapters=adapters_of(DENSE, LoraConfig(rank=1, targets=["q_proj"]))) if "memory" in line
    ]
    assert f"{(frozen * 4 + 4 * 16 * 16) / 2**20:,.1f} MiB for frozen weights, and" in line


def test_adapters_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lora\.targets has 'query', which is no linear layer of the model; there are down_proj, gate_proj"):
        adapters_of(DENSE, LoraConfig(targets=["query"]))
    for architecture, lora in ((MOE, LoraConfig()), (DENSE, LoraConfig(dora=True))):
        with pytest.raises(ValueError, match=r"is not there for trainer\.backend = 'megatron'"):
            adapters_of(architecture, lora)


def test_parallelism_that_fsdp_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pipeline_parallel = 2 needs trainer.backend = 'megatron'"):
        TrainerConfig(ranks=2, pipeline_parallel=2)
