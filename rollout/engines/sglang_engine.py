"""Rollout engine `sglang`: the real SGLang server, on CPU or GPU, behind the contract of `contracts.py`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from miles.core.model.config import LoraConfig, ModelConfig
from rollout.config import RolloutConfig
from rollout.engines.contracts import EngineError, EngineHealth, Generation, PauseMode, Request
from rollout.engines.scoring import Scored, ScoreRequest, check_score_request
from rollout.engines.sglang_args import model_facts, server_arguments, server_environment
from rollout.engines.sglang_lora import ADAPTER, SGLangAdapters, adapter_arguments, adapter_specs, write_zeros
from rollout.engines.sglang_scoring import score_body, scored
from rollout.engines.sglang_server import SGLangServer
from rollout.engines.sglang_weights import SGLangWeights
from rollout.engines.sglang_wire import check_request, generation, request_body
from weight_sync.contracts import Bucket, GroupSpec, Manifest, Payload

HEALTH_DEADLINE_S = 10.0
ABORT_INTERVAL_S = 0.02
ABORT_GRACE_S = 2.0
ABORT_DEADLINE_S = 60.0
"""How long a server may go on with requests that it was told to end. They end within a step, so after this it is broken."""
GIVEN_UP_S = 10.0
"""By then SGLang has ended, by itself, requests whose connection was closed."""


class SGLangEngine:
    """One server and its only client.

    Log-probs are SGLang's own: of the distribution at the sampling temperature (at 1 when greedy), before top-k and top-p, as the
    contract asks. Seeds count only in SGLang's deterministic mode (`rollout.sglang_args.enable_deterministic_inference = true`);
    tokens then depend on seed and position, log-probs in the last bits still on the batch. With `model.true_on_policy` (CPU, float32)
    that mode is on and the log-probs are exactly the trainer's, see `sglang_invariant.py`.

    Weight versions are exact for every token on CPU. On a GPU, where SGLang computes one step ahead, an update in place may give
    the first token after it the new version though the old weights made it. On a GPU this engine was not measured.

    Args:
        log_folder: the server's output goes to a file in it.
        weight_version: the version that the weights in `model.path` are.
        lora: serve the model with adapters, which are all that updates bring; zeros at first.
    """

    def __init__(self, model: ModelConfig, rollout: RolloutConfig, *, log_folder: Path, weight_version: int = 0, lora: LoraConfig | None = None) -> None:
        self._model = model
        self._rollout = rollout
        self._facts = model_facts(model)
        self._lora = lora
        self._adapter = {} if lora is None else adapter_specs(model, lora)
        more = {} if lora is None else adapter_arguments(lora, self._adapter, rollout.gpus_per_engine == 0)
        self._arguments = server_arguments(model, rollout, self._facts, weight_version, more)
        self._seeded = bool(self._arguments.get("enable_deterministic_inference", False))
        self._server = SGLangServer(Path(log_folder))
        ranks = int(self._arguments.get("tp_size", 1))
        common = self._server, self._facts, model.dtype, ranks, weight_version
        self._weights = SGLangWeights(*common) if lora is None else SGLangAdapters(*common, self._adapter)
        self._in_flight: dict[str, str] = {}  # server id -> request id
        self._given_up: dict[str, str] = {}  # the same, of requests whose caller has gone and which SGLang may be at work on
        self._resumed: asyncio.Event | None = None  # set while paused; new requests wait for it
        self._pause_mode: PauseMode | None = None
        self._own_pause = False
        self._asleep: set[str] = set()
        self._tokens_generated = 0
        self._busy_since = 0.0
        self._seconds_busy = 0.0

    @property
    def pid(self) -> int:
        """The server's main process, leader of a process group that holds everything this engine started."""
        return self._server.pid

    @property
    def url(self) -> str:
        """Where the server listens, on loopback."""
        return self._server.url

    @property
    def scratch(self) -> Path | None:
        """The folder of the server's sockets and weight files, while there is one."""
        return self._server.scratch

    async def start(self) -> None:
        """Start the server and wait until it serves: 13 s on an idle two-core machine, more on a busy one.

        Raises:
            EngineError: SGLang is not installed, or did not come up; the message ends with its log.
        """
        await self._server.start(self._begin_in)

    def _begin_in(self, scratch: Path) -> tuple[dict[str, Any], dict[str, str]]:
        adapters = {} if self._lora is None else {"lora_paths": [write_zeros(scratch / "adapter", self._lora, self._adapter)]}
        return self._arguments | adapters, server_environment(self._model, self._rollout, self._facts, self._arguments, scratch)

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """See `Engine.generate`. Waits while the engine is paused. The deadline is the caller's: it cancels this call."""
        if not requests:
            return []
        for request in requests:
            check_request(request, self._facts)
        while self._resumed is not None:
            await self._resumed.wait()
        if self._asleep:
            raise EngineError(f"{self._server.name} is asleep ({', '.join(sorted(self._asleep))}): wake it before generating")
        # SGLang aborts by prefix of the id, and two ids in use at once are an error: the caller's ids cannot serve.
        server_ids = [uuid.uuid4().hex for _ in requests]
        body = request_body(requests, server_ids, self._facts, self._weights.commits, self._seeded) | self._by_adapter(len(requests))
        self._enter(requests, server_ids)
        try:
            answers = await self._server.post("/generate", body, None)
        except asyncio.CancelledError:
            # The connection closes, and SGLang itself ends the requests within four seconds; `abort` does it at once.
            self._given_up |= {server_id: self._in_flight[server_id] for server_id in server_ids}
            asyncio.get_running_loop().call_later(GIVEN_UP_S, self._forget, server_ids)
            raise
        finally:
            self._leave(server_ids)
        generations = [generation(request, answer) for request, answer in zip(requests, answers, strict=True)]
        self._tokens_generated += sum(len(g.tokens) for g in generations)
        return generations

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        """See `ScoringEngine.score`, at temperature 1. Waits while the engine is paused."""
        if not requests:
            return []
        for request in requests:
            check_score_request(request, context=self._facts.context, vocabulary=self._facts.vocabulary)
        while self._resumed is not None:
            await self._resumed.wait()
        body = score_body(requests, extra_key=f"commit-{self._weights.commits}") | self._by_adapter(len(requests))
        answers = await self._server.post("/generate", body, None)
        return [scored(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def hold(self) -> AbstractContextManager[None]:
        """SGLang promises no admission order."""
        return nullcontext()

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`. New requests wait until `resume`."""
        if self._pause_mode is not None:
            return
        self._pause_mode, self._resumed = mode, asyncio.Event()
        if mode == "abort":
            await self._abort_until(lambda: not self._in_flight)
        # SGLang's own abort mode sleeps a second between looks and lets its scheduler run on; nothing runs here any more.
        await self._call("/pause_generation", {"mode": "in_place" if mode == "in_place" else "retract"})

    async def resume(self) -> None:
        if self._pause_mode is None:
            return
        await self._call("/continue_generation", {"torch_empty_cache": False})
        self._pause_mode = None
        if self._resumed is not None:
            self._resumed.set()
            self._resumed = None

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`. Returns when they ended; with others of their `generate` call still running, after `ABORT_GRACE_S`. Those whose
        caller gave up before are told to end, and not waited for.

        While paused by `retract`, a request ends with the tokens the server has handed over, which may be fewer than it made (they
        are then sampled again); paused `in_place`, it ends at `resume`.
        """
        wanted = None if request_ids is None else set(request_ids)
        ids = {server_id for server_id, request_id in self._in_flight.items() if wanted is None or request_id in wanted}
        if left := {server_id for server_id, request_id in self._given_up.items() if wanted is None or request_id in wanted}:
            self._forget(left)
            await self._abort_once(left)
        if self._pause_mode is not None:
            await self._abort_once(ids)
            return
        deadline = time.monotonic() + ABORT_GRACE_S
        await self._abort_until(lambda: not ids & self._in_flight.keys() or time.monotonic() > deadline, ids)

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Ends running requests, then asks the server to release memory. On CPU SGLang answers and releases nothing."""
        unknown = set(tags) - {"weights", "kv_cache"}
        if unknown:
            raise ValueError(f"sleep tags {sorted(unknown)} are unknown; valid: weights, kv_cache")
        self._asleep |= set(tags)
        await self._abort_until(lambda: not self._in_flight)
        # A request whose caller gave up may still run for seconds, and SGLang dies when it is asked for memory while it works.
        await self._abort_once(None)
        await self._call("/pause_generation", {"mode": "retract"})
        await self._call("/release_memory_occupation", {"tags": list(tags)})

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """On a GPU released weights come back empty, so they are loaded again from what is retained."""
        woken = sorted(self._asleep & set(tags))
        if not woken:
            return
        await self._call("/resume_memory_occupation", {"tags": woken})
        if "weights" in woken and self._rollout.gpus_per_engine > 0:
            await asyncio.to_thread(self._weights.restore)
        self._asleep -= set(woken)
        if not self._asleep and self._pause_mode is None:
            await self._call("/continue_generation", {"torch_empty_cache": False})

    async def health(self) -> EngineHealth:
        """Asks the scheduler itself, so a server that hangs is not healthy. Counts are this client's."""
        detail = ""
        try:
            await asyncio.to_thread(self._server.call, "/server_info", None, HEALTH_DEADLINE_S)
        except EngineError as error:
            detail = str(error)
        running = min(len(self._in_flight), self._rollout.max_running)
        busy = time.monotonic() - self._busy_since if self._in_flight else 0.0
        return EngineHealth(
            ok=not detail,
            weight_version=self._weights.version,
            running=running,
            waiting=len(self._in_flight) - running,
            tokens_generated=self._tokens_generated,
            seconds_busy=self._seconds_busy + busy,
            detail=detail,
        )

    async def close(self) -> None:
        self._weights.leave()
        await asyncio.to_thread(self._server.close)

    def weights_version(self) -> int:
        return self._weights.version

    def weights_join(self, group: GroupSpec, rank: int) -> None:
        """The engine is one member of the group, however many ranks its server has."""
        self._weights.join(group, rank)

    def weights_begin(self, manifest: Manifest) -> None:
        """See `WeightReceiver.weights_begin`. An engine that is not paused yet pauses (retract) until commit or abort."""
        self._weights.check(manifest)
        if self._pause_mode is None:
            self._server.call("/pause_generation", {"mode": "retract"})
            self._own_pause = True
        self._weights.begin(manifest)

    def weights_receive(self, bucket: Bucket, payload: Payload) -> None:
        self._weights.receive(bucket, payload)

    def weights_prepared(self, digests: bool) -> dict[str, str]:
        return self._weights.prepared(digests)

    def weights_commit(self, version: int) -> None:
        """See `WeightReceiver.weights_commit`. Paused `in_place` running requests keep their KV cache; otherwise it is dropped."""
        if not self._weights.open and version == self._weights.version:
            return
        self._drop_cache()
        self._weights.commit(version)
        self._end_own_pause()

    def weights_abort(self) -> None:
        """See `WeightReceiver.weights_abort`. An engine that `pause` stopped generates again at `resume`."""
        if self._weights.open:
            self._weights.abort()
            self._drop_cache()
        self._weights.leave()
        self._end_own_pause()

    def _by_adapter(self, count: int) -> dict[str, Any]:
        return {} if self._lora is None else {"lora_path": [ADAPTER] * count}

    async def _call(self, path: str, body: dict[str, Any]) -> Any:
        return await asyncio.to_thread(self._server.call, path, body)

    async def _abort_until(self, done: Callable[[], bool], ids: set[str] | None = None) -> None:
        """Again and again, since a request that was posted just now may reach the scheduler after the call to abort it.

        Raises:
            EngineError: requests are still there after ABORT_DEADLINE_S.
        """
        deadline = time.monotonic() + ABORT_DEADLINE_S
        while not done():
            if time.monotonic() > deadline:
                raise EngineError(f"{self._server.name} did not end its {len(self._in_flight)} requests within {ABORT_DEADLINE_S:g} s of being told to")
            await self._abort_once(ids)
            await asyncio.sleep(ABORT_INTERVAL_S)

    async def _abort_once(self, ids: set[str] | None) -> None:
        if ids is None or ids == self._in_flight.keys():
            await self._call("/abort_request", {"abort_all": True})
        else:
            await asyncio.gather(*(self._call("/abort_request", {"rid": server_id}) for server_id in ids))

    def _enter(self, requests: Sequence[Request], server_ids: Sequence[str]) -> None:
        if not self._in_flight:
            self._busy_since = time.monotonic()
        self._in_flight.update(zip(server_ids, (request.request_id for request in requests), strict=True))

    def _leave(self, server_ids: Sequence[str]) -> None:
        for server_id in server_ids:
            del self._in_flight[server_id]
        if not self._in_flight:
            self._seconds_busy += time.monotonic() - self._busy_since

    def _forget(self, server_ids: Iterable[str]) -> None:
        for server_id in server_ids:
            self._given_up.pop(server_id, None)

    def _drop_cache(self) -> None:
        if self._pause_mode != "in_place":
            self._server.call("/flush_cache", {})

    def _end_own_pause(self) -> None:
        if self._own_pause:
            self._server.call("/continue_generation", {"torch_empty_cache": False})
            self._own_pause = False
