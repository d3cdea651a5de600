"""A checkpoint of a run with the `fsdp` backend as a Hugging Face directory, without ranks: what `miles convert` makes of one."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from miles.core.checkpoint.store import read_manifest
from miles.core.checkpoint.whole import check_new
from miles.core.model.config import ModelConfig
from miles.core.model.load import load_config, load_model
from trainer.fsdp.export import Exporter


def to_huggingface(checkpoint: Path, base: Path, target: Path, dtype: torch.dtype | None) -> int:
    """Write the checkpoint's weights, and those of `base` that it does not train, with base's configuration and tokenizer; returns its version.

    The whole model is in memory in float32, as the masters are.

    Args:
        base: the model directory that the run began from. dtype: of the weights in the target; None: those of `base`.
    Raises:
        ValueError: `target` exists or cannot be, or the checkpoint's tensors are not those of `base`; the first that differs is named.
        CheckpointError: `checkpoint` is not complete.
    """
    check_new(target)
    version = int(read_manifest(checkpoint)["state"]["version"])
    stored = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    model = load_model(str(base), torch.float32)
    own = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    wanted: dict[str, torch.Tensor] = {}
    for name in (name for name in stored if name.startswith("model.")):
        shape = list(getattr(stored[name], "size", []))
        if ".lora_" in name:
            raise ValueError(
                f"checkpoint {checkpoint} has adapters and no whole weights: the run exports both when it ends, `miles rl --resume` brings it there"
            )
        if name not in own or list(own[name].shape) != shape:
            there = f"it is {list(own[name].shape)}" if name in own else "there is none"
            raise ValueError(f"checkpoint {checkpoint} has {name!r} of {shape}, but in {base} {there}: was the run begun from that model?")
        wanted[name] = own[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it should be: there is one process
        dcp.load(wanted, checkpoint_id=checkpoint, no_dist=True)
    stated = load_config(base).dtype
    Exporter(model, dtype or (stated if isinstance(stated, torch.dtype) else torch.float32), rank=0).write(ModelConfig(path=str(base)), target)
    return version
