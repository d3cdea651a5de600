"""Scoring engine `address`: an SGLang server that somebody else started, and that outlives the run, or several behind an sglang-router."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from typing import Any

import aiohttp

from rollout.engines.contracts import EngineError
from rollout.engines.scoring import Scored, ScoreRequest
from rollout.engines.sglang_scoring import one_score_body, scored

ATTEMPTS = 4
AT_ONCE = 64  # calls
BACKOFF_S = 1.0  # doubled after each attempt


class SGLangAddress:
    """See `ScoringEngine`; scores are those of temperature 1.

    Args:
        url: up to the port. api_key_env: environment variable with the server's key, or None.
        timeout_s: deadline of one attempt.
    """

    def __init__(self, url: str, *, api_key_env: str | None, timeout_s: float) -> None:
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._key = os.environ[api_key_env] if api_key_env is not None else None

    async def start(self) -> None:
        """Raises EngineError where no SGLang server with a language model answers."""
        facts = await self._persist("/model_info", None)
        if facts is None:  # a router has it under its older name
            facts = await self._persist("/get_model_info", None)
        if not isinstance(facts, dict) or not facts.get("is_generation", False):
            raise EngineError(f"distill.address = {self._url!r} serves no language model: /model_info says {str(facts)[:200]}")

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        if not requests:
            return []
        return await asyncio.gather(*(self._score(request) for request in requests))

    async def _score(self, request: ScoreRequest) -> Scored:
        """By itself: a router takes one sequence a call, and chooses a server for each by what it begins with."""
        async with self._at_once:
            answer = await self._persist("/generate", one_score_body(request))
        if not isinstance(answer, dict) or "meta_info" not in answer:
            raise EngineError(f"distill.address = {self._url!r} was sent a sequence and answered {str(answer)[:200]}")
        return scored(request, answer)

    async def close(self) -> None:
        pass

    async def _persist(self, path: str, body: dict[str, Any] | None) -> Any:
        """The JSON answer, asked for again while the server cannot be reached or is in trouble."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._ask(path, body)
            except (aiohttp.ClientError, TimeoutError) as error:
                if attempt == ATTEMPTS:
                    raise EngineError(
                        f"the teacher at distill.address = {self._url!r} gave no answer to {path} in {ATTEMPTS} attempts, "
                        f"the last time {type(error).__name__}: {error}"
                    ) from error
                await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
        raise AssertionError("at least one attempt")

    async def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        """Raises ClientError or TimeoutError where another attempt may help, else EngineError. Redirects are not followed: they would carry
        the key to an address that the recipe does not name."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.request("GET" if body is None else "POST", self._url + path, json=body, allow_redirects=False) as response,
        ):
            if response.status >= 500 or response.status in (408, 429):
                response.raise_for_status()
            if response.status == 404 and body is None:
                return None
            if response.status != 200:
                text = (await response.text()).replace(self._key or "\0", "[redacted]")[:500]
                raise EngineError(f"the teacher at distill.address = {self._url!r} refuses {path} with status {response.status}: {text}")
            try:
                return await response.json(content_type=None)
            except ValueError as error:
                raise EngineError(f"the teacher at distill.address = {self._url!r} answered {path} with something that is no JSON: {error}") from error
