"""A teacher behind an address that is in trouble: a real server on loopback that answers as it is told."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollout.engines import sglang_address
from rollout.engines.contracts import EngineError
from rollout.engines.scoring import ScoreRequest
from rollout.engines.sglang_address import SGLangAddress

REQUEST = ScoreRequest(tokens=np.array([5, 6]), start=1)
SCORES = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.5, 6, None]]}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_address, "BACKOFF_S", 0.01)


def ask(script: list[Any], *, key: str | None = None) -> tuple[Any, list[str]]:
    """What `score` gives against a server that answers by `script` (a status, bytes or JSON), the last entry again and again; and the keys it saw."""
    keys: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        step = script[min(len(keys), len(script) - 1)]
        keys.append(request.headers.get("Authorization", ""))
        if isinstance(step, int):
            return web.Response(status=step, text=f"no: {keys[-1]}", headers={"Location": "/elsewhere"})
        return web.Response(body=step) if isinstance(step, bytes) else web.json_response(step)

    async def run() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            return await SGLangAddress(f"http://127.0.0.1:{port}/", api_key_env=key, timeout_s=5).score([REQUEST])
        finally:
            await runner.cleanup()

    return asyncio.run(run()), keys


def test_a_server_in_trouble_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    (scored,), keys = ask([503, 429, SCORES], key="SOME_KEY")
    assert scored.logprobs.tolist() == [-1.5]
    assert keys == ["Bearer secret"] * 3


def test_a_server_that_stays_in_trouble_is_named() -> None:
    with pytest.raises(EngineError, match=r"teacher at distill.address = 'http://127.0.0.1:\d+' gave no answer to /generate in 4 attempts"):
        ask([503])


def test_an_address_where_nothing_listens_is_named() -> None:
    with pytest.raises(EngineError, match="gave no answer to /model_info in 4 attempts"):
        asyncio.run(SGLangAddress("http://127.0.0.1:9", api_key_env=None, timeout_s=5).start())


@pytest.mark.parametrize("status", [400, 401, 307])
def test_a_refusal_ends_it_and_does_not_repeat_the_key(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    with pytest.raises(EngineError, match=f"refuses /generate with status {status}") as caught:
        ask([status], key="SOME_KEY")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("nonsense", [b"<html>", [], {"error": "?"}, [{"meta_info": {}}]])
def test_nonsense_is_an_error(nonsense: Any) -> None:
    with pytest.raises(EngineError):
        ask([nonsense])
