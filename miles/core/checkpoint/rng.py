"""Random states of a process as a tensor of JSON text: it travels in the checkpoint, and reading it runs no code."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch


def tensor_name(rank: int) -> str:
    """The name of a rank's random states in a checkpoint."""
    return f"rng.{rank}"


def capture() -> torch.Tensor:
    """States of Python, NumPy and torch (CPU, and the current CUDA device where there is one), uint8 [bytes]."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": bytes(torch.get_rng_state().numpy()).hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = bytes(torch.cuda.get_rng_state().numpy()).hex()
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def restore(captured: torch.Tensor) -> None:
    state = json.loads(bytes(captured.numpy()))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_from_hex(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_hex(state["cuda"]))


def seed_all(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch; ranks differ."""
    words = np.random.SeedSequence([seed, rank]).generate_state(3, np.uint32)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(bytes.fromhex(text)), dtype=torch.uint8)
