"""`kill PID` unwinds the run like an exception, so that its context managers end what they started."""

from __future__ import annotations

import signal
from types import FrameType

TERMINATED = 143
"""Exit code, as a shell gives it: 128 + SIGTERM."""

_asked = False


def unwind_when_terminated() -> None:
    """From here on SIGTERM raises SystemExit. Main thread only."""
    global _asked
    _asked = True
    signal.signal(signal.SIGTERM, _terminate)


def insist() -> None:
    """Once more, where it was asked for: Ray puts handlers of its own in place when it is imported and when it starts, and they abort the process."""
    if _asked:
        unwind_when_terminated()


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)
