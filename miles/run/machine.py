"""What this machine has to give: cores, memory, shared memory, disk. Container limits count."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import psutil

MIB = 2**20
_CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """GPUs that torch sees here. Imports torch."""
    import torch

    return torch.cuda.device_count()


def free_memory() -> int:
    """Bytes of memory that can still be used, within the container's limit where there is one."""
    free = psutil.virtual_memory().available
    limit, used = _read_int(_CGROUP / "memory.max"), _read_int(_CGROUP / "memory.current")
    return free if limit is None or used is None else min(free, limit - used)


def free_shared_memory() -> int | None:
    """Free bytes of /dev/shm, None where there is none (macOS)."""
    return shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None


def free_disk(path: Path) -> int:
    """Free bytes on the disk of `path`, or of its nearest parent that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def ray_address(configured: str | None) -> str | None:
    """The Ray cluster to join: `cluster.address`, else RAY_ADDRESS, which `ray job submit` sets too. None: one is started here."""
    address = configured or os.environ.get("RAY_ADDRESS") or "local"
    return None if address == "local" else address


def answers(address: str, seconds: float = 2.0) -> bool:
    """Whether something accepts a connection at `host:port`."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return False
    try:
        with socket.create_connection((host, int(port)), timeout=seconds):
            return True
    except OSError:
        return False


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
