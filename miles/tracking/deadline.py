"""Runs a call that may never return, such as one to a server that is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call(function: Callable[[], T], seconds: float) -> T:
    """`function()`, or TimeoutError after `seconds`; whatever it raises is raised here.

    The thread of a call that does not return stays behind as a daemon, so it never keeps the process alive.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - carried to the caller, who sees it as its own
            errors.append(error)

    thread = threading.Thread(target=target, daemon=True, name="deadline")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
