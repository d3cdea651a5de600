"""Environment variables that every process needs before it imports torch. Imports nothing heavy.

OpenMP's default of spinning idle threads costs 5x to 16x on a busy two-core machine, so it is off everywhere, and each process
gets its own share of threads.

Worker processes also keep the memory that a step frees for the next one, in huge pages: glibc would map and unmap every larger tensor
anew, and the page faults of that cost a small model's step a tenth. A worker so holds on to at most `HELD` bytes more than it uses.
"""

from __future__ import annotations

import os

DEFAULTS = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

HELD = 2**30

# glibc 2.35 and later; an older one takes what it knows of it, and other C libraries ignore it.
ALLOCATOR = {"GLIBC_TUNABLES": f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold={HELD}:glibc.malloc.trim_threshold={HELD}"}


def worker_environment(threads: int) -> dict[str, str]:
    """Variables for a worker process that may use `threads` CPU threads (OpenMP, MKL); what the user has set is kept."""
    chosen = {name: os.environ.get(name, value) for name, value in (DEFAULTS | ALLOCATOR).items()}
    return chosen | _threads(threads)


def set_defaults(threads: int = 1) -> None:
    """Set them for this process, unless the user has. Call before torch is imported."""
    for name, value in (DEFAULTS | _threads(threads)).items():
        os.environ.setdefault(name, value)


def _threads(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
