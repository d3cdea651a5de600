"""Threads for searches by a user's regular expression, which may take long: engine calls wait in other threads, not behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_THREADS = ThreadPoolExecutor(4, thread_name_prefix="pattern")


async def searched(search: Callable[[], T]) -> T:
    """What `search` returns or raises. It must give the interpreter free while it searches and have a deadline of its own, as `regex` does with
    `concurrent=True` and `timeout`: a thread cannot be ended."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, search)
