"""What a model costs by the token: multiply-adds of its matrices and of attention, read off its modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from miles.core.planning.hardware import HardwareSpec

BACKWARD = 2
"""A matrix product's backward is two products: for its input and for its weight."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One model.

    Attributes:
        weights: entries of all matrices that a token meets in the layers; of an expert layer those of the experts it is sent to.
        hidden, vocabulary: of the head. heads x width: of queries, in each of `layers`.
        root, in_layers: entries of the parameters that FSDP2 gathers with the root and with the layers, padding included; 0 where nothing is
            sharded. gathered_bytes, reduced_bytes: of one entry.
    """

    layers: int
    weights: int
    hidden: int
    vocabulary: int
    heads: int
    width: int
    root: int = 0
    in_layers: int = 0
    gathered_bytes: int = 4
    reduced_bytes: int = 4

    def matmul_flops(self, tokens: int, scored: int, fused: bool) -> int:
        """Forward and backward of a pass over `tokens`, of which `scored` are scored. Unless `fused`, logits are computed again in the backward."""
        head = 2 * scored * self.hidden * self.vocabulary
        return (1 + BACKWARD) * 2 * tokens * self.weights + ((1 if fused else 2) + BACKWARD) * head

    def attention_flops(self, scores: int) -> int:
        """Forward (2 products) and backward (5) of attention with so many query-key pairs a head, padding and what a causal mask hides included."""
        return self.layers * self.heads * self.width * 2 * scores * (2 + 5)

    def sequence_seconds(self, tokens: int, scored: int, hardware: HardwareSpec) -> float:
        """Forward and backward of one sequence in a packed row, whose causal attention looks at half of the pairs. What a row costs whatever is
        in it is left out, so that costs of sequences add up to those of rows."""
        flops = self.matmul_flops(tokens, scored, fused=True) + self.attention_flops(tokens * (tokens + 1) // 2)
        return flops / hardware.flops_per_s + tokens * self.layers * self.hidden * hardware.value_s

    def collectives(self, passes: int) -> tuple[dict[str, int], dict[str, int]]:
        """Number and bytes of the collectives of so many passes, forward and backward, with one reduction at the end.

        Layers are gathered for the forward and again for the backward, the root once.
        """
        if not self.root:
            return {}, {}
        number = {"all_gather": passes * (1 + 2 * self.layers), "reduce_scatter": 1 + self.layers}
        gathered = passes * (self.root + 2 * self.in_layers) * self.gathered_bytes
        return number, {"all_gather": gathered, "reduce_scatter": (self.root + self.in_layers) * self.reduced_bytes}


def workload_of(model: PreTrainedModel, compute_dtype: torch.dtype | None = None) -> Workload:
    """Before or after `fully_shard`. Matrices of the layers are all parameters with two dimensions; with three, those of experts.

    Args:
        compute_dtype: in which FSDP2 gathers parameters; None: their own.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    outside = {id(p) for module in (head, model.get_input_embeddings()) for p in module.parameters()}
    matrices = [p for p in model.parameters() if id(p) not in outside]
    weights = sum(p.numel() for p in matrices if p.ndim == 2)
    experts = [p for p in matrices if p.ndim == 3]
    if experts:
        weights += sum(p.numel() // p.shape[0] for p in experts) * config.num_experts_per_tok
    units = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    in_layers = {id(p) for unit in units for p in unit.parameters()}
    return Workload(
        layers=config.num_hidden_layers,
        weights=weights,
        hidden=config.hidden_size,
        vocabulary=head.out_features,
        heads=config.num_attention_heads,
        width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        root=sum(_padded(p) for p in model.parameters() if id(p) not in in_layers) if units else 0,
        in_layers=sum(_padded(p) for p in model.parameters() if id(p) in in_layers),
        gathered_bytes=(compute_dtype or model.dtype).itemsize,
        reduced_bytes=model.dtype.itemsize,
    )


def _padded(parameter: Tensor) -> int:
    """Entries of all shards of a parameter, which are of one size."""
    shards = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
    rows = parameter.shape[0]
    return -(-rows // shards) * shards * (parameter.numel() // rows)
