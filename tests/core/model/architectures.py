"""Small random models of several architectures, made in memory."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 101


def random_model(kind: str = "qwen3", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Two layers, 4 query heads on 2 key heads, tied embeddings, context 256."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(sizes | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).eval()
    with torch.no_grad():  # random norms and biases too: ones and zeros would hide what is left out
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def make_norms_exact(within: nn.Module) -> None:
    """transformers' norms round to float32, a floor of 1e-7 under what is compared here."""
    for module in within.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_norm, module)


def _norm(module: nn.Module, x: Tensor) -> Tensor:
    return torch.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def random_rows(lengths: list[int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


def pack(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens_T, positions_T, sequence_T."""
    return (
        torch.cat(rows),
        torch.cat([torch.arange(len(row)) for row in rows]),
        torch.cat([torch.full((len(row),), number) for number, row in enumerate(rows)]),
    )


def every_target(positions_T: torch.Tensor) -> torch.Tensor:
    """Every token but the first of each sequence."""
    return (positions_T > 0).nonzero()[:, 0]


def alone(model: PreTrainedModel, rows: list[torch.Tensor], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of every target by transformers' own forward, row by row. The model's attention must be sdpa."""
    logprobs, entropies = [], []
    for row in rows:
        every = torch.log_softmax(model(input_ids=row[None], use_cache=False).logits[0] / temperature, -1)
        logprobs.append(every[:-1].gather(1, row[1:, None])[:, 0])
        entropies.append(-(every.exp() * every).sum(-1)[:-1])
    return torch.cat(logprobs), torch.cat(entropies)
