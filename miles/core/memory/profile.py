"""What each layer's actions cost in time on this machine, measured once for a model and kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Profile:
    """Seconds a token (CPU-seconds on a CPU), by layer, that an action costs beyond keeping: the second forward; compressing and restoring."""

    recompute: tuple[float, ...]
    compress: tuple[float, ...]


def folder() -> Path:
    """`MILES_CACHE`, else `~/.cache/miles`."""
    return Path(os.environ.get("MILES_CACHE") or Path.home() / ".cache" / "miles") / "activations"


def key_of(config: dict[str, Any], dtype: torch.dtype, device: torch.device, threads: int) -> str:
    """Names a model's shape (a transformers configuration) on a machine."""
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.processor() or platform.machine()} {platform.node()}"
    told = {"model": config, "dtype": str(dtype), "machine": machine, "threads": threads, "torch": torch.__version__}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:24]


def load(key: str) -> Profile | None:
    """None where none was stored, or what is there cannot be read: it is then measured anew."""
    try:
        path = folder() / f"{key}.json"
        if not path.is_file():
            return None
        found = json.loads(path.read_text())
        return Profile(recompute=tuple(map(float, found["recompute"])), compress=tuple(map(float, found["compress"])))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        logger.warning("the kept profile %s cannot be read, and is measured anew: %r", key, error)
        return None


def store(key: str, profile: Profile) -> None:
    """Whole or not at all, also where two runs do it at once. Where it cannot be, that is said, and the next run measures again."""
    try:
        path = folder() / f"{key}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(profile)))
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # no room, no right, or no home at all
        logger.warning("the profile of this model is not kept (%s): set MILES_CACHE to a folder that can be written", error)
