"""Multi-head latent attention over tensor ranks."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

if not transformer_engine.HAVE_TE:
    multi_latent_attention.HAVE_TE = False  # Megatron-Core 0.16.1 says True where its own wrappers import, Transformer Engine or not


class LatentAttention(MLASelfAttention):
    """Megatron-Core's, with the whole gradient of the rotary key that all heads share.

    Megatron-Core gathers what its tensor ranks computed of that key, and each rank's heads read it; its backward takes for the gradient
    what the rank's own heads say. Here what the ranks say is summed.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        if self.world_size > 1:
            assert self.config.sequence_parallel, "there are experts, with which Megatron-Core wants it"
            self.linear_kv_down_proj.register_forward_hook(self._gathered)

    def _gathered(self, module: nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """[T, 1, W] of this rank's W columns -> all columns of this rank's tokens. The rotary part is gathered again next, over tokens: that sums."""
        return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(output[0])), output[1]
