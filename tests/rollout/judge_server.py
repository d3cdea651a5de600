"""A real chat-completions server on loopback that behaves as a script says, one entry a request; the last entry repeats."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


def said(words: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": words}, "finish_reason": "stop"}]}


class JudgeServer:
    """`script`: a string is the judge's words, an int a status, "HANG" never answers, bytes are the raw body, a dict is the JSON.

    `requests` has every body that came, `headers` every Authorization, "" without one,
    `times` when each came, in seconds.
    """

    def __init__(self, script: list[Any]) -> None:
        self._script = script
        self.requests: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.times: list[float] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        step = self._script[min(len(self.requests), len(self._script) - 1)]
        self.requests.append(await request.json())
        self.times.append(time.monotonic())
        self.headers.append(request.headers.get("Authorization", ""))
        if step == "HANG":
            await asyncio.sleep(60)
        if step == "DROP":
            assert request.transport is not None
            request.transport.abort()
        if step == "REDIRECT":
            raise web.HTTPTemporaryRedirect("/v1/elsewhere")
        if isinstance(step, int):
            return web.Response(status=step, text=f"status {step} for {self.headers[-1]}")
        if isinstance(step, bytes):
            return web.Response(body=step)
        return web.Response(text=json.dumps(said(step) if isinstance(step, str) else step), content_type="application/json")


@asynccontextmanager
async def serving(*script: Any) -> AsyncIterator[JudgeServer]:
    server = JudgeServer(list(script))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    app.router.add_post("/v1/elsewhere", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
