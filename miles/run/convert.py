"""`miles convert`: a model's weights from one format to the other."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch

from miles.config import ConfigError
from miles.core.checkpoint.store import MANIFEST
from trainer.fsdp import snapshot
from trainer.megatron.convert import Conversion, to_huggingface, to_megatron

GIB = 2**30


def run(source: str, target: str, *, to: str, model: str | None, dtype: str | None, file_gib: float) -> None:
    """`to` is megatron or huggingface. Raises ValueError as `trainer.megatron.convert` does, and where options do not go together."""
    if not 0 < file_gib < math.inf:
        raise ConfigError(f"--file-gib = {file_gib:g} must be a number of more than 0")
    if to == "megatron" and model is not None:
        raise ConfigError("--model goes with --to huggingface: a Hugging Face directory describes itself")
    if to == "huggingface" and _is_of_fsdp(Path(source)):
        if model is None:
            raise ConfigError(
                f"--model is missing: {source!r} is a checkpoint of trainer.backend = 'fsdp', so name the model directory that its run began from"
            )
        version = snapshot.to_huggingface(Path(source), Path(model), Path(target), None if dtype is None else getattr(torch, dtype))
        _report(f"version {version} of the run")
        print(target)
        return
    conversion = Conversion(Path(source), Path(target), int(file_gib * GIB), None if dtype is None else getattr(torch, dtype), _report)
    if to == "megatron":
        to_megatron(conversion)
    else:
        to_huggingface(conversion, None if model is None else Path(model))
    print(target)


def _is_of_fsdp(folder: Path) -> bool:
    """A checkpoint of a run that dist_checkpointing did not write."""
    return (folder / MANIFEST).exists() and not (folder / "metadata.json").exists()


def _report(line: str) -> None:
    print(f"convert: {line}", file=sys.stderr)
