"""What runs in the SGLang server's process: `python -m rollout.engines.sglang_launcher`, started by `sglang_server.py` only.

The first line of stdin is JSON, so that the API key stands in no process list. After it stdin stays open as a lifeline: it ends
when the process that started us does, however that died, and then the whole process group goes too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

# What a killed SGLang leaves under /dev/shm: its load snapshot and message queues, multiprocessing's semaphores and shared memory.
_LEFT_BEHIND = ("sglang_", "sgl_", "sem.mp-", "psm_")


def main() -> None:
    start = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, args=(start["scratch"],), daemon=True).start()
    sys.argv = ["sglang", *start["arguments"]]

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(start["arguments"]))


def end_group(group: int, scratch: str | None, known: Iterable[Path] = ()) -> None:
    """Kill every process of the group (the caller last, if it is one) and remove what they had under /dev/shm, the `known` files too."""
    for file in shared_files(group).union(known):
        file.unlink(missing_ok=True)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    with contextlib.suppress(ProcessLookupError):  # every member is gone already
        os.killpg(group, signal.SIGKILL)


def shared_files(group: int) -> set[Path]:
    """Files under /dev/shm that the group's processes map, of the kinds that only they use."""
    return {file for pid in group_members(group) for file in _mapped(pid) if file.parent == Path("/dev/shm") and file.name.startswith(_LEFT_BEHIND)}


def group_members(group: int) -> Iterator[int]:
    """Process ids in the group, without those that are dead and only wait to be reaped."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                state, _, member_of = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(member_of) == group and state != "Z":
                    yield int(entry.name)


def _mapped(pid: int) -> set[Path]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()  # it ended while we looked
    return {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "/dev/shm/" in line}


def _end_with_parent(scratch: str) -> None:
    sys.stdin.buffer.read()
    end_group(os.getpgid(0), scratch)


if __name__ == "__main__":  # SGLang spawns its workers, which import this module again
    main()
