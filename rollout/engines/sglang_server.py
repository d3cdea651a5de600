"""The SGLang server as a child process: start, talk over HTTP on loopback, and end it for certain."""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from rollout.engines.contracts import EngineError
from rollout.engines.sglang_args import command_line
from rollout.engines.sglang_launcher import end_group, group_members, shared_files

START_DEADLINE_S = 600.0
CONTROL_DEADLINE_S = 120.0
PORT_ATTEMPTS = 5
_PORT_TAKEN = "address already in use"


class SGLangServer:
    """One server in a process group of its own, its output in `log`, its sockets and weight files in `scratch`.

    Nothing outlives it: `close` and the end of this process, even by SIGKILL, end the whole group (see `sglang_launcher.py`).
    The API key is made here, known to both processes only, and keeps other users of the machine out.
    """

    def __init__(self, log_folder: Path) -> None:
        self.name = f"sglang-{os.getpid()}-{secrets.token_hex(4)}"
        self.log = log_folder / f"{self.name}.log"
        self.scratch: Path | None = None
        self._key = secrets.token_hex(32)  # it must not begin with a dash, which would be an option
        self._process: subprocess.Popen[bytes] | None = None
        # Seen while it starts, since a process that is killed later can no longer be asked.
        self._shared: set[Path] = set()
        self.url = ""

    @property
    def pid(self) -> int:
        """The server's main process, which leads its group."""
        assert self._process is not None, "start the server first"
        return self._process.pid

    async def start(self, begin: Callable[[Path], tuple[dict[str, Any], dict[str, str]]]) -> None:
        """Start, and return when it serves. `begin` is given the scratch folder, and says arguments and environment.

        Raises:
            EngineError: SGLang is not installed, or it ended or did not serve in time; the message ends with its log.
        """
        if importlib.util.find_spec("sglang") is None:
            raise EngineError(
                "SGLang is not installed: run bash scripts/sglang_cpu/install VENV (CPU) or pip install sglang (GPU), or set rollout.engine=torch"
            )
        atexit.register(self.close)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        arguments, environment = begin(self.scratch)
        for _ in range(PORT_ATTEMPTS):
            self._spawn(arguments, environment)
            if await self._ready():
                return
            self._end_group()
        raise EngineError(f"{self.name}: {PORT_ATTEMPTS} free ports were taken by others before SGLang had bound them{self.tail()}")

    def call(self, path: str, body: dict[str, Any] | None = None, deadline_s: float = CONTROL_DEADLINE_S) -> Any:
        """POST `body` (GET when None) and return the JSON answer; blocks.

        Raises:
            EngineError: no answer, or one that says no.
        """
        request = urllib.request.Request(self.url + path, None if body is None else json.dumps(body).encode(), self._headers())
        try:
            with urllib.request.urlopen(request, timeout=deadline_s) as response:
                return _decoded(response.read())
        except urllib.error.HTTPError as error:
            raise self.refused(path, error.code, error.read().decode(errors="replace")) from error
        except OSError as error:
            raise self.lost(path, error) from error

    async def post(self, path: str, body: dict[str, Any], deadline_s: float | None) -> Any:
        """As `call`, without blocking the event loop. Without a deadline only the end of the connection ends the wait."""
        timeout = aiohttp.ClientTimeout(total=deadline_s)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.post(self.url + path, json=body, headers=self._headers()) as response:
                answer = await response.read()
                if response.status != 200:
                    raise self.refused(path, response.status, answer.decode(errors="replace"))
                return _decoded(answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.lost(path, error) from error

    def refused(self, path: str, status: int, text: str) -> EngineError:
        return EngineError(f"{self.name}: {path} answered {status}: {text[:500]}")

    def lost(self, path: str, error: Exception) -> EngineError:
        try:
            # A connection breaks a moment before its process can be reaped.
            state = f"it ended with code {self._process.wait(0.5)}" if self._process is not None else "it was not started"
        except subprocess.TimeoutExpired:
            state = "it still runs"
        return EngineError(f"{self.name}: no answer to {path} ({type(error).__name__}: {error}); {state}{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        """The end of the log, to be put at the end of a message."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 20_000))
                text = file.read().decode(errors="replace").replace(self._key, "***")
        except FileNotFoundError:
            return ""
        return f"\n--- the end of {self.log} ---\n" + "\n".join(text.splitlines()[-lines:])

    def close(self) -> None:
        """Kill the group and remove the scratch folder. Idempotent."""
        self._end_group()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch = None
        atexit.unregister(self.close)

    def _spawn(self, arguments: dict[str, Any], environment: dict[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        full = {**arguments, "host": "127.0.0.1", "port": port, "api_key": self._key}
        start = {"scratch": str(self.scratch), "arguments": command_line(full)}
        # Output goes to a file: a helper of the server that lives on would keep an inherited pipe open.
        with os.fdopen(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rollout.engines.sglang_launcher"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(start).encode() + b"\n")
        self._process.stdin.flush()

    async def _ready(self) -> bool:
        """True when it serves, False when its port was taken meanwhile."""
        assert self._process is not None
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            self._shared |= shared_files(self._process.pid)
            if self._process.poll() is not None:
                if _PORT_TAKEN in self.tail().lower():
                    return False
                raise EngineError(f"{self.name}: SGLang ended with code {self._process.returncode} while it started{_ADVICE}{self.tail()}")
            if await asyncio.to_thread(self._answers):
                return True
            await asyncio.sleep(0.2)
        self.close()
        raise EngineError(f"{self.name}: SGLang did not serve within {START_DEADLINE_S:g} s{_ADVICE}{self.tail()}")

    def _answers(self) -> bool:
        try:
            self.call("/model_info", deadline_s=5)
        except EngineError:
            return False
        return True

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}

    def _end_group(self) -> None:
        if self._process is None:
            return
        end_group(self._process.pid, None, self._shared)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        deadline = time.monotonic() + 10
        while any(group_members(self._process.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)


def _decoded(answer: bytes) -> Any:
    """Some control endpoints answer in plain words."""
    try:
        return json.loads(answer)
    except ValueError:
        return answer.decode(errors="replace")


_ADVICE = "; check rollout.sglang_args, free memory and model.path, or take rollout.engine=torch"
