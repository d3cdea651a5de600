"""`miles convert`: a model's weights from one format to the other."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from miles.config import ConfigError
from trainer.megatron.convert import Conversion, to_huggingface, to_megatron

GIB = 2**30


def run(source: str, target: str, *, to: str, model: str | None, dtype: str | None, file_gib: float) -> None:
    """`to` is megatron or huggingface. Raises ValueError as `trainer.megatron.convert` does, and where options do not go together."""
    if file_gib <= 0:
        raise ConfigError(f"--file-gib = {file_gib:g} must be more than 0")
    if to == "megatron" and model is not None:
        raise ConfigError("--model goes with --to huggingface: a Hugging Face directory describes itself")
    conversion = Conversion(Path(source), Path(target), int(file_gib * GIB), None if dtype is None else getattr(torch, dtype), _report)
    if to == "megatron":
        to_megatron(conversion)
    else:
        to_huggingface(conversion, None if model is None else Path(model))
    print(target)


def _report(line: str) -> None:
    print(f"convert: {line}", file=sys.stderr)
