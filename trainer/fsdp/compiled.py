"""Compiles each decoder layer around its attention: layers of one shape share their graphs, and rows of any length do.

The attention of packed rows stays outside: what it does follows from the lengths of a row's sequences, for which every row would be compiled anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import AttentionInterface

from miles.core.model.packed import ATTENTION

BACKEND = "inductor"


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """In place, an instance's forward each, so that names stay and the hooks of FSDP2 and of recomputation stay outside. Before the first forward
    nothing is compiled; then a graph takes seconds to minutes."""
    attention = AttentionInterface()[ATTENTION]
    AttentionInterface.register(ATTENTION, torch.compiler.disable(attention))  # of this process: for models that are not compiled it is the same
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=BACKEND)
