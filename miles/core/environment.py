"""Environment variables that every process needs before it imports torch. Imports nothing heavy.

OpenMP's default of spinning idle threads costs 5x to 16x on a busy two-core machine, so it is off everywhere, and each process
gets its own share of threads.
"""

from __future__ import annotations

import os

DEFAULTS = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def worker_environment(threads: int) -> dict[str, str]:
    """Variables for a worker process that may use `threads` CPU threads (OpenMP, MKL); what the user has set is kept."""
    chosen = {name: os.environ.get(name, value) for name, value in DEFAULTS.items()}
    return chosen | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def set_defaults(threads: int = 1) -> None:
    """Set them for this process, unless the user has. Call before torch is imported."""
    for name, value in worker_environment(threads).items():
        os.environ.setdefault(name, value)
