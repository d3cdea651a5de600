"""The one check of an announced update against what an engine holds, made before any byte moves."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from weight_sync.contracts import Manifest, TensorSpec, WeightSyncError


def check_manifest(manifest: Manifest, held: Mapping[str, TensorSpec], engine: str, may_lack: Collection[str] = ()) -> None:
    """Refuse what does not fit.

    Args:
        held: the engine's tensors by the names of its checkpoint, tied ones once.
        engine: its name, for the message.
        may_lack: names that the engine does not need, such as a tied head that some checkpoints store twice.
    Raises:
        WeightSyncError: names the first tensor that is unknown, has another shape or dtype, comes twice or is left out.
    """
    prefix = f"{engine} refuses version {manifest.version}:"
    seen: set[str] = set()
    for spec in manifest.tensors:
        own = held.get(spec.name)
        if own is None:
            raise WeightSyncError(f"{prefix} tensor {spec.name!r} is not in the model")
        if spec.shape != own.shape:
            raise WeightSyncError(f"{prefix} tensor {spec.name!r} has shape {list(spec.shape)}, the engine holds {list(own.shape)}")
        if spec.dtype != own.dtype:
            raise WeightSyncError(f"{prefix} tensor {spec.name!r} is {spec.dtype}, the engine holds {own.dtype} (model.dtype)")
        if spec.name in seen:
            raise WeightSyncError(f"{prefix} tensor {spec.name!r} comes twice")
        seen.add(spec.name)
    missing = held.keys() - seen - set(may_lack)
    if missing:
        raise WeightSyncError(f"{prefix} {len(missing)} tensors are left out, the first is {min(missing)!r}")
