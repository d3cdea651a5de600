"""Samples as JSON for checkpoints: bit-exact and without pickle. Arrays are base64 of their bytes."""

from __future__ import annotations

import base64
from dataclasses import fields
from typing import Any

import numpy as np

from miles.data.types import Sample, Status


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """A dict that `json.dumps` takes, as long as `metadata` is JSON itself. What a teacher said is left out: it is asked again."""
    values = {field.name: getattr(sample, field.name) for field in fields(sample) if field.name != "taught"}
    return {name: _array_to_json(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}


def sample_from_json(state: dict[str, Any]) -> Sample:
    """The sample that `sample_to_json` was given, every bit of it (NaN payloads too)."""
    values: dict[str, Any] = {name: _array_from_json(value) if name in _ARRAYS else value for name, value in state.items()}
    return Sample(**values | {"status": Status(state["status"])})


_ARRAYS = {"tokens", "loss_mask", "logprobs", "weight_versions"}


def _array_to_json(array: np.ndarray) -> list[str]:
    return [array.dtype.str, base64.b64encode(array.tobytes()).decode("ascii")]


def _array_from_json(state: list[str]) -> np.ndarray:
    dtype, data = state
    return np.frombuffer(base64.b64decode(data), np.dtype(dtype)).copy()
