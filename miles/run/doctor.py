"""`miles doctor`: is this machine ready? Each item is ok, or says what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles.core.environment import DEFAULTS
from miles.run import machine
from miles.run.machine import MIB
from miles.tracking.wandb_sink import has_key

DISTRIBUTION = "miles-rl"
ESSENTIAL = ("torch", "transformers", "tokenizers", "safetensors", "ray", "pydantic", "numpy")
NEED_SHM, NEED_DISK, NEED_MEMORY = 512 * MIB, 2048 * MIB, 3072 * MIB


@dataclass(frozen=True)
class Finding:
    """`advice`: works, but could be better. `missing`: nothing runs until it is mended."""

    item: str
    state: Literal["ok", "advice", "missing"]
    text: str


def run() -> int:
    """Print every finding; 1 when something essential is missing."""
    findings = list(examine())
    width = max(len(f.item) for f in findings)
    for finding in findings:
        print(f"{finding.state:<8} {finding.item:<{width}}  {finding.text}")
    missing = [f.item for f in findings if f.state == "missing"]
    print(f"\nnot ready: {', '.join(missing)}" if missing else "\nready")
    return 1 if missing else 0


def examine() -> Iterator[Finding]:
    yield _python()
    yield from _packages()
    yield from _devices()
    yield from _threads()
    yield _loopback()
    yield _shared_memory()
    yield _disk()
    yield _memory()
    yield _ray_address()
    yield _sglang()
    yield _megatron()
    yield _wandb()


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    pins = _pins()
    for name in ESSENTIAL:
        found = _version(name)
        pin = pins.get(name)
        if found is None:
            yield Finding(name, "missing", "not installed: run `bash scripts/install`")
        elif pin is not None and found.partition("+")[0] != pin:
            yield Finding(name, "advice", f"{found}, but Miles is tested with {pin}: `bash scripts/install` installs it")
        else:
            yield Finding(name, "ok", found)


def _pins() -> dict[str, str]:
    """Exact versions that the installed distribution asks for."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    matches = (re.match(r"([\w.\-]+)(?:\[[^\]]*\])?==([^;\s]+)", line) for line in requirements)
    return {match[1].lower(): match[2] for match in matches if match}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[Finding]:
    if _version("torch") is None:
        return
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield Finding("devices", "ok", f"{torch.cuda.device_count()} GPUs: {names} (torch for {build})")
    elif Path("/dev/nvidia0").exists():
        yield Finding(
            "devices", "advice", f"there is an NVIDIA GPU, but torch (built for {build}) cannot use it: check the driver, or install a CUDA build of torch"
        )
    else:
        yield Finding("devices", "ok", f"CPU only, {machine.cores()} cores (torch for {build})")


def _threads() -> Iterator[Finding]:
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        value = os.environ.get(name)
        if name == "OMP_WAIT_POLICY" and (value or "").upper() != DEFAULTS[name]:
            yield Finding(name, "advice", f"is {value!r}; idle threads then spin and take the cores from others: `export OMP_WAIT_POLICY=PASSIVE`")
        elif name == "OMP_NUM_THREADS" and value is not None and value.isdigit() and int(value) > machine.cores():
            yield Finding(name, "advice", f"is {value}, but there are {machine.cores()} cores: set it to at most that")
        else:
            yield Finding(name, "ok", str(value))


def _loopback() -> Finding:
    """Ray, gloo and SGLang all talk over loopback ports."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
            return Finding("ports", "ok", "a free port on 127.0.0.1 can be opened and reached")
    except OSError as error:
        return Finding("ports", "missing", f"no port on 127.0.0.1 can be opened and reached ({error}): check the firewall or sandbox of this shell")


def _shared_memory() -> Finding:
    free = machine.free_shared_memory()
    if free is None:
        return Finding("/dev/shm", "advice", "there is none: Ray keeps its objects on disk, and weight_sync.transport must be broadcast")
    if free < NEED_SHM:
        return Finding("/dev/shm", "missing", f"{free // MIB} MiB free of at least {NEED_SHM // MIB}: in a container use --shm-size=1g, else remount it larger")
    return Finding("/dev/shm", "ok", f"{free // MIB:,} MiB free")


def _disk() -> Finding:
    free = machine.free_disk(Path.cwd())
    if free < NEED_DISK:
        return Finding("disk", "advice", f"{free // MIB} MiB free here: checkpoints of a run may not fit; put run.folder on a larger disk")
    return Finding("disk", "ok", f"{free // MIB:,} MiB free in {Path.cwd()}")


def _memory() -> Finding:
    free = machine.free_memory()
    if free < NEED_MEMORY:
        return Finding("memory", "advice", f"{free // MIB} MiB free; the smallest run needs about {NEED_MEMORY // MIB}: end other programs")
    return Finding("memory", "ok", f"{free // MIB:,} MiB free")


def _ray_address() -> Finding:
    address = machine.ray_address(None)
    if address is None:
        return Finding("ray cluster", "ok", "RAY_ADDRESS names none: a run starts its own cluster and ends it")
    if address == "auto" or machine.answers(address):
        return Finding("ray cluster", "ok", f"a run joins the one at RAY_ADDRESS = {address!r}; cluster.address=local starts its own")
    return Finding("ray cluster", "missing", f"RAY_ADDRESS = {address!r} is stale, nothing answers there: `unset RAY_ADDRESS`, or start that cluster")


def _sglang() -> Finding:
    version = _version("sglang")
    if version is None or importlib.util.find_spec("sglang") is None:
        return Finding("sglang", "advice", "not installed; only rollout.engine = 'sglang' needs it: `bash scripts/install --test`")
    return Finding("sglang", "ok", version)


def _megatron() -> Finding:
    version = _version("megatron-core")
    if version is None:
        return Finding("megatron-core", "advice", "not installed; only trainer.backend = 'megatron' needs it: `bash scripts/install --test`")
    return Finding("megatron-core", "ok", version)


def _wandb() -> Finding:
    version = _version("wandb")
    if version is None:
        return Finding("wandb", "advice", "not installed; tracking.wandb must stay disabled: run `bash scripts/install`")
    if not has_key():
        return Finding("wandb", "ok", f"{version}; no key, so online is not possible: set WANDB_API_KEY for that (offline and disabled need none)")
    return Finding("wandb", "ok", f"{version}; a key is set")
