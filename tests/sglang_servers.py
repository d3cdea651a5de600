"""SGLang servers as fixtures have them."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout.engines.sglang_engine import SGLangEngine


def started(engine: SGLangEngine) -> Iterator[SGLangEngine]:
    """Body of a fixture: the server, from its start to its end."""
    try:
        asyncio.run(engine.start())
        yield engine
    finally:
        asyncio.run(engine.close())


@contextmanager
def routed(urls: Sequence[str], key: str, log: Path) -> Iterator[str]:
    """The address of an sglang-router in front of servers that all have this key; up once it has seen each of them well."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics = one.getsockname()[1], other.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics), "--policy", "cache_aware"]
    with log.open("wb") as stream:
        command = [sys.executable, "-m", "sglang_router.launch_router", *options, "--api-key", key, "--worker-urls", *urls]
        router = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/get_model_info", headers={"Authorization": f"Bearer {key}"})
        deadline = time.monotonic() + 120
        while True:
            with suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(request, timeout=10):
                break
            up = router.poll() is None and time.monotonic() < deadline
            assert up, log.read_text(errors="replace")[-2000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        router.terminate()
        router.wait(30)
