"""Reads what the writer wrote, into tensors that exist already, at any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from miles.core.checkpoint import rng
from miles.core.checkpoint.store import CheckpointError, read_manifest

logger = logging.getLogger(__name__)


def load(folder: Path, tensors: Mapping[str, torch.Tensor], *, rank: int, world: int, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill `tensors` in place from `folder` and restore this rank's random states; returns `(state, extra)`. Collective.

    At another number of ranks than the checkpoint's the tensors are the same, but random states have no owner: they are seeded
    anew from `seed` and the checkpoint's step, and a warning says so.

    Raises:
        CheckpointError: `folder` is not complete, or its tensors are not those asked for; the first that differs is named.
    """
    manifest = read_manifest(folder)
    stored: dict[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    _check(folder, tensors, stored)
    wanted = dict(tensors)
    same_world = manifest["world"] == world
    if same_world:
        wanted[rng.tensor_name(rank)] = torch.empty(stored[rng.tensor_name(rank)].size, dtype=torch.uint8)
    dcp.load(wanted, checkpoint_id=folder, no_dist=not dist.is_initialized())
    resume_rng(folder, manifest, wanted.get(rng.tensor_name(rank)), rank=rank, world=world, seed=seed)
    return manifest["state"], manifest["extra"]


def resume_rng(folder: Path, manifest: dict[str, Any], captured: torch.Tensor | None, *, rank: int, world: int, seed: int) -> None:
    """This rank's random states as the checkpoint has them; seeded anew where `captured` is None, at another number of ranks."""
    if captured is not None:
        rng.restore(captured)
    else:
        logger.warning("checkpoint %s is of %d ranks and this run has %d: random states are seeded anew", folder, manifest["world"], world)
        rng.seed_all(seed + int(manifest["state"].get("optimizer_step", 0)), rank)


def _check(folder: Path, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Any]) -> None:
    """torch would leave what is missing as it was in some cases; here names, shapes and dtypes must all agree."""
    names = {name for name in stored if not name.startswith("rng.")}
    for name in sorted(names ^ tensors.keys()):
        side = "the checkpoint lacks it" if name in tensors else "this run has no such tensor"
        raise CheckpointError(f"checkpoint {folder} does not fit: tensor {name!r}: {side}")
    for name, tensor in tensors.items():
        entry = stored[name]
        assert isinstance(entry, TensorStorageMetadata)
        if entry.size != tensor.shape or entry.properties.dtype != tensor.dtype:
            raise CheckpointError(
                f"checkpoint {folder} does not fit: tensor {name!r} is {entry.properties.dtype}{list(entry.size)} there, "
                f"{tensor.dtype}{list(tensor.shape)} here"
            )
