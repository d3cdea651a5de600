"""What a model costs by the token: multiply-adds of its matrices and of attention, read off its modules."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

BACKWARD = 2
"""A matrix product's backward is two products: for its input and for its weight."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model.

    Attributes:
        weights: entries of all matrices that a token meets in the layers; of an expert layer those of the experts it is sent to.
        head: hidden size x vocabulary. heads x width: of queries, in each of `layers`.
    """

    layers: int
    weights: int
    hidden: int
    vocabulary: int
    heads: int
    width: int

    def matmul_flops(self, tokens: int, scored: int) -> int:
        """Forward and backward of a pass over `tokens`, of which `scored` are scored: the logits are computed once more in the backward."""
        head = 2 * scored * self.hidden * self.vocabulary
        return (1 + BACKWARD) * 2 * tokens * self.weights + (2 + BACKWARD) * head

    def attention_flops(self, scores: int) -> int:
        """Forward (2 products) and backward (5) of attention with so many query-key pairs a head, padding and what a causal mask hides included."""
        return self.layers * self.heads * self.width * 2 * scores * (2 + 5)


def workload_of(model: PreTrainedModel) -> Workload:
    """Before or after `fully_shard`. Matrices of the layers are all parameters with two dimensions; with three, those of experts."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    outside = {id(p) for module in (head, model.get_input_embeddings()) for p in module.parameters()}
    matrices = [p for p in model.parameters() if id(p) not in outside]
    weights = sum(p.numel() for p in matrices if p.ndim == 2)
    experts = [p for p in matrices if p.ndim == 3]
    if experts:
        weights += sum(p.numel() // p.shape[0] for p in experts) * config.num_experts_per_tok
    return Workload(
        layers=config.num_hidden_layers,
        weights=weights,
        hidden=config.hidden_size,
        vocabulary=head.out_features,
        heads=config.num_attention_heads,
        width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )
