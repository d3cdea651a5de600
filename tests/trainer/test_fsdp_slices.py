"""FSDP's name-and-slice map on real architectures: the ranks' slices make up the files that transformers writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from trainer.fsdp.slices import _block, checkpoint_blocks, local
from weight_sync.slices import rows_of

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24, "vocab_size": 37,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3, tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3 moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=6, num_experts=5, num_experts_per_tok=2, tie_word_embeddings=False),
}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_ranks_slices_make_up_the_checkpoint(kind: str, world: int, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in stored.items()}
    for own, parameter in model.named_parameters():  # tied ones once
        for block in checkpoint_blocks(model, own, tuple(parameter.shape)):
            for rank, shard in enumerate(torch.chunk(parameter.detach(), world)):
                held = local(block, tuple(parameter.shape), rows_of(parameter.shape[0], world, rank))
                if held is not None:
                    part = found[held.name][tuple(slice(*r) for r in held.there)]
                    assert part.isnan().all(), "held twice"
                    part.copy_(shard[tuple(slice(*r) for r in held.here)].reshape(part.shape))
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())


PLACE = torch.empty(3, 4, device="meta")


@pytest.mark.parametrize(
    ("part", "why"), [(PLACE.t(), "lies in w in another order"), (PLACE[:, ::2], "lies in w in another order"), (PLACE + 1, "is computed")]
)
def test_what_is_no_rectangle_is_refused_by_name(part: torch.Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=f"^t {why}.*'p2p' cannot slice it"):
        _block("w", "t", part, PLACE)
