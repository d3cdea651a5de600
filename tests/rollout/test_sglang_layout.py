"""SGLang's merged parameters: shapes and contents are those of SGLang's own layers, loaded by their own loaders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.engines.sglang_layout import Parameter, rank_parameters
from weight_sync.contracts import TensorSpec

HIDDEN, HEADS, KV, WIDTH, INNER, VOCABULARY = 16, 4, 2, 8, 24, 70
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "l.self_attn.q_proj.weight": (HEADS * WIDTH, HIDDEN),
    "l.self_attn.k_proj.weight": (KV * WIDTH, HIDDEN),
    "l.self_attn.v_proj.weight": (KV * WIDTH, HIDDEN),
    "l.self_attn.q_proj.bias": (HEADS * WIDTH,),
    "l.self_attn.k_proj.bias": (KV * WIDTH,),
    "l.self_attn.v_proj.bias": (KV * WIDTH,),
    "l.self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
    "l.mlp.gate_proj.weight": (INNER, HIDDEN),
    "l.mlp.up_proj.weight": (INNER, HIDDEN),
    "l.mlp.down_proj.weight": (HIDDEN, INNER),
    "l.norm.weight": (HIDDEN,),
}
SPECS = {name: TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def filled(parameter: Parameter, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    made = torch.zeros(parameter.shape)
    for block in parameter.blocks:
        part = made[tuple(slice(*r) for r in block.here)]
        part.copy_(stored[block.name][tuple(slice(*r) for r in block.there)].reshape(part.shape))
    return made


def sglangs_own(ranks: int, rank: int) -> dict[str, list[Any]]:
    """Runs in a process of its own: SGLang's import changes torch."""
    from sglang.srt.layers import linear

    group = SimpleNamespace(rank_in_group=rank, world_size=ranks)
    linear._resolve_linear_group = lambda parallel_group: group
    stored = tensors()
    layers = {
        "qkv_proj": linear.QKVParallelLinear(HIDDEN, WIDTH, HEADS, KV, bias=True, params_dtype=torch.float32),
        "gate_up_proj": linear.MergedColumnParallelLinear(HIDDEN, [INNER, INNER], bias=False, params_dtype=torch.float32),
        "o_proj": linear.RowParallelLinear(HEADS * WIDTH, HIDDEN, bias=False, params_dtype=torch.float32),
        "down_proj": linear.RowParallelLinear(INNER, HIDDEN, bias=False, params_dtype=torch.float32),
    }
    found = {}
    for layer, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up")), ("o_proj", ()), ("down_proj", ())):
        for kind, parameter in layers[layer].named_parameters():
            prefix = "l.self_attn." if layer in ("qkv_proj", "o_proj") else "l.mlp."
            for number, part in enumerate(parts):
                parameter.weight_loader(parameter, stored[f"{prefix}{part}_proj.{kind}"], part if layer == "qkv_proj" else number)
            if not parts:
                parameter.weight_loader(parameter, stored[f"{prefix}{layer}.{kind}"])
            found[f"{prefix}{layer}.{kind}"] = parameter.detach().tolist()
    return found


CASES = [(1, 0), (2, 1), (4, 3)]


@pytest.mark.full
@pytest.mark.sglang
def test_projections_are_as_sglangs_own_loaders_merge_and_cut_them() -> None:
    """Four ranks are more than there are key-value heads."""
    pytest.importorskip("sglang")
    root = Path(__file__).resolve().parents[2]
    script = f"import json; from tests.rollout.test_sglang_layout import sglangs_own; print(json.dumps([sglangs_own(*case) for case in {CASES}]))"
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=600, check=True)
    for case, own in zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True):
        mapped = rank_parameters(SPECS, KV, *case)
        assert len(own) == 5
        for name, values in own.items():
            assert torch.equal(filled(mapped[name], tensors()), torch.tensor(values)), (case, name)


@pytest.mark.parametrize(("ranks", "share"), [(1, 128), (2, 64), (3, 64)])
def test_the_vocabulary_is_filled_up_to_whole_tiles_for_every_rank(ranks: int, share: int) -> None:
    parameters = [rank_parameters({"lm_head.weight": TensorSpec("lm_head.weight", (70, 4), "float32")}, 1, ranks, r)["lm_head.weight"] for r in range(ranks)]
    assert [p.shape for p in parameters] == [(share, 4)] * ranks
    rows = [block.there[0] for p in parameters for block in p.blocks]
    assert rows == [(start, min(start + share, 70)) for start in range(0, 70, share)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_of_a_layer_lie_in_two_tensors(ranks: int) -> None:
    shapes = {f"l.mlp.experts.{e}.{k}_proj.weight": (4, 6) if k == "down" else (6, 4) for e in range(3) for k in ("gate", "up", "down")}
    stored = {name: torch.randn(shape) for name, shape in shapes.items()}
    specs = {name: TensorSpec(name, shape, "float32") for name, shape in shapes.items()}
    size = 6 // ranks
    for rank in range(ranks):
        mapped = rank_parameters(specs, 1, ranks, rank)
        own = slice(rank * size, (rank + 1) * size)
        up = [torch.cat([stored[f"l.mlp.experts.{e}.{k}_proj.weight"][own] for k in ("gate", "up")]) for e in range(3)]
        down = [stored[f"l.mlp.experts.{e}.down_proj.weight"][:, own] for e in range(3)]
        assert torch.equal(filled(mapped["l.mlp.experts.w13_weight"], stored), torch.stack(up))
        assert torch.equal(filled(mapped["l.mlp.experts.w2_weight"], stored), torch.stack(down))


def test_what_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match=r"l\.mlp\.gate_proj\.weight \[24, 16\] does not divide over 5 "):
        rank_parameters({name: SPECS[name] for name in SPECS if "gate" in name}, KV, 5, 0)
