"""What a process started with a worker's environment really does with memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from miles.core.environment import HELD, set_defaults, worker_environment

RESIDENT = """
import ctypes, pathlib
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
block = libc.malloc({size})
ctypes.memset(block, 1, {size})
libc.free(block)
print(int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096)
"""


def resident(size: int) -> int:
    """Bytes that a worker process occupies after it has filled and freed `size` bytes."""
    command = [sys.executable, "-c", RESIDENT.format(size=size)]
    done = subprocess.run(command, env={**os.environ, **worker_environment(1)}, capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


def test_a_worker_keeps_the_memory_that_it_frees_up_to_a_bound() -> None:
    assert resident(2**28) > 2**28
    assert resident(HELD + 2**20) < 2**28


def test_what_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert worker_environment(2)["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=1"


def test_a_driver_does_not_hand_the_allocator_to_everything_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in worker_environment(1):
        monkeypatch.delenv(name, raising=False)
    set_defaults(2)
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert "GLIBC_TUNABLES" not in os.environ
