"""Views between shards of different tensor-parallel degree, on real tensors: every view is the re-sharded copy, and nothing that is rebuilt lies
anywhere in the other shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from miles.core.sharding.engine_layout import engine_parts, separate_parts
from miles.core.sharding.views import beside, saved_bytes, views
from trainer.megatron.architecture import Architecture
from trainer.megatron.layout import Layout
from trainer.megatron.names import parts, shapes

Tensors = dict[str, NDArray[np.int32]]
SIZES: dict[str, Any] = {"layers": 1, "hidden": 4, "heads": 8, "kv_heads": 4, "head_width": 2, "feed_forward": 8, "norm_epsilon": 1e-6, "windows": (None,)}
MODELS = {
    "qwen3, tied": Architecture(family="qwen3", vocabulary=128, tied=True, head_norm=True, **SIZES),
    "qwen2, vocabulary padded": Architecture(family="qwen2", vocabulary=300, tied=False, qkv_bias=True, **SIZES),
}
DEGREES = [(a, b) for a in (1, 2, 4) for b in (1, 2, 4)]


def checkpoint(architecture: Architecture) -> Tensors:
    """No number twice, none of them 0."""
    found, start = {}, 1
    for name, shape in shapes(architecture).items():
        size = int(np.prod(shape))
        found[name] = np.arange(start, start + size, dtype=np.int32).reshape(shape)
        start += size
    return found


def filled(held: Mapping[str, Any], whole: Tensors) -> Tensors:
    """What a rank has in memory, copied block by block."""
    found = {}
    for name, part in held.items():
        found[name] = np.zeros(part.shape, np.int32)
        for block in part.blocks:
            found[name][tuple(slice(*r) for r in block.here)] = whole[block.name][tuple(slice(*r) for r in block.there)]
    return found


def trainers(architecture: Architecture, degree: int, rank: int) -> Mapping[str, Any]:
    return parts(architecture, Layout(tensor=degree), rank)[0]


@pytest.mark.parametrize("layout", ["engine's own", "separate", "megatron"])
@pytest.mark.parametrize("architecture", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("engine", "trainer"), DEGREES)
def test_views_are_the_copies_and_what_is_rebuilt_is_nowhere(architecture: Architecture, engine: int, trainer: int, layout: str) -> None:
    whole = checkpoint(architecture)
    held = {"megatron": trainers, "separate": separate_parts, "engine's own": engine_parts}[layout]
    for device in range(max(engine, trainer)):
        of_engine, of_trainer = beside(device, engine, trainer)
        sides = engine_parts(architecture, engine, of_engine), held(architecture, trainer, of_trainer)
        smaller, larger = sides if engine >= trainer else sides[::-1]
        small, large = filled(smaller, whole), filled(larger, whole)
        rows = views(smaller, larger, itemsize=4)
        assert [row.tensor for row in rows] == list(smaller)
        for row in rows:
            wanted = small[row.tensor]
            assert row.bytes == wanted.nbytes
            if row.owner is not None:
                seen = large[row.owner][row.start : row.start + len(wanted)]
                assert np.shares_memory(seen, large[row.owner])
                assert seen.tobytes() == wanted.tobytes()
            else:
                assert not wanted.any() or not any(contains(tensor, wanted) for tensor in large.values()), row


def contains(tensor: NDArray[np.int32], wanted: NDArray[np.int32]) -> bool:
    """Whether `wanted` lies somewhere in `tensor` in one piece."""
    flat, piece = tensor.ravel(), wanted.ravel()
    return any(np.array_equal(flat[start : start + len(piece)], piece) for start in np.flatnonzero(flat == piece[0]))


def test_equal_degrees_in_one_layout_share_all_and_different_ones_the_rows() -> None:
    architecture = MODELS["qwen3, tied"]
    one, half = engine_parts(architecture, 1, 0), engine_parts(architecture, 2, 1)
    assert saved_bytes(views(one, one, 4)) == sum(4 * int(np.prod(part.shape)) for part in one.values())
    kinds = {row.tensor.rpartition("layers.0.")[2]: (row.owner is not None, row.why) for row in views(half, one, 4)}
    assert kinds["model.embed_tokens.weight"] == (True, "")
    assert kinds["self_attn.qkv_proj.weight"] == (False, "fused parts lie in another order or at another distance")
    assert kinds["self_attn.o_proj.weight"] == (False, "columns of a matrix are not contiguous")
    rebuilt = {row.tensor.rpartition("layers.0.")[2] for row in views(separate_parts(architecture, 2, 1), one, 4) if row.owner is None}
    assert rebuilt == {"self_attn.o_proj.weight", "mlp.down_proj.weight"}, "each of queries, keys, values, gate and up lies in one piece"


def test_degrees_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="degrees 2 and 3: one must divide the other"):
        beside(0, 2, 3)
