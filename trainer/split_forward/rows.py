"""The attention context of one pass. It travels through the model's call to every attention layer, as `miles.core.model.packed` says."""

from __future__ import annotations

from torch import Tensor

from miles.core.model.invariant_segments import invariant_segment_attention
from miles.core.sequence_parallel.segments import SegmentLayout, segment_attention


class SplitRows:
    """Not a dataclass: FSDP2 rebuilds those.

    Args:
        keys, values: by layer, those of the passes before that this one reads, [M, G, E] each; leaves where gradients are wanted.
        longest: tokens of the longest path that ends in this pass.
        record: keep this pass's own keys and values.
        exact: batch-invariant operators.
    Attributes:
        own_keys, own_values: [T, G, E] by layer number, where recorded. The first write stays: the recompute of a checkpointed layer
            would put tensors of another graph there.
    """

    def __init__(self, layout: SegmentLayout, keys: list[list[Tensor]], values: list[list[Tensor]], *, longest: int, record: bool, exact: bool):
        self._layout, self._keys, self._values, self._longest, self._record = layout, keys, values, longest, record
        self._attention = invariant_segment_attention if exact else segment_attention
        self.own_keys: dict[int, Tensor] = {}
        self.own_values: dict[int, Tensor] = {}

    def attend(self, layer: int, query_THE: Tensor, key_TGE: Tensor, value_TGE: Tensor, scaling: float, dropout: float, window: int | None) -> Tensor:
        if dropout:
            raise ValueError(f"trainer.prompt_sharing computes a prompt once for all its answers, so dropout ({dropout}) would be theirs together: set it to 0")
        if window is not None and self._longest > window:
            raise ValueError(
                f"a sequence of {self._longest} tokens is longer than the model's sliding window of {window}, which trainer.prompt_sharing does not have: "
                f"set model.context = {window}, or trainer.prompt_sharing = false"
            )
        if self._record:
            self.own_keys.setdefault(layer, key_TGE)
            self.own_values.setdefault(layer, value_TGE)
        keys, values = ([by_layer[layer] for by_layer in source] for source in (self._keys, self._values))
        return self._attention(query_THE, key_TGE, value_TGE, keys, values, self._layout, scaling)
