"""The engine that lives in its caller's process: the model code that trainers use, a decoding thread, continuous batching.

It is the default for laptops and tests, and the one that can be exact: with `model.true_on_policy` the log-probs it records
while decoding token by token equal, bit for bit, those that the trainer computes on packed rows.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from miles.core.model.batch_invariant import make_batch_invariant
from miles.core.model.config import LoraConfig, ModelConfig
from miles.core.model.decode import Decoder
from miles.core.model.load import context_length, load_model
from miles.core.model.lora import add_adapters, twin
from miles.core.model.packed import output_head
from rollout.engines.contracts import EngineError, EngineHealth, Generation, PauseMode, Request
from rollout.engines.torch_batch import Row, RunningBatch
from rollout.engines.torch_weights import StagedWeights
from weight_sync.contracts import Bucket, GroupSpec, Manifest, Payload, TensorSpec

_TAGS = frozenset({"weights", "kv_cache"})


class TorchEngine:
    """See `contracts.Engine`. Everything that touches rows or weights runs in the decoding thread, between two tokens.

    Args:
        max_running: rows decoded at once; others wait in the order in which they came.
        threads: CPU threads of this process's torch.
        lora: serve the model with adapters, which are all that updates bring.
        base: with `lora`, the model without them, loaded already: engines of one process share it. None: it is loaded.
    Raises:
        ValueError: the model cannot be read, or its architecture is not one that this engine decodes.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        max_running: int,
        threads: int,
        weight_version: int = 0,
        lora: LoraConfig | None = None,
        base: PreTrainedModel | None = None,
    ):
        assert base is None or lora is not None, "whole weights would be written over those of others"
        torch.set_num_threads(threads)
        self._threads = threads
        module = load_base(model) if base is None else twin(base)
        if lora is not None:
            add_adapters(module, lora, seed=0)  # they do nothing until the first update
        if model.true_on_policy:
            make_batch_invariant(module)
        context = model.context or context_length(model.path, trust_remote_code=model.trust_remote_code)
        self._decoder = Decoder(module, max_running, context)
        self._vocabulary = len(output_head(module).weight)
        self._weights = StagedWeights(module, weight_version)
        self._batch = RunningBatch(self._decoder, max_running)
        self._waiting: deque[Row] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._held = 0
        self._paused: PauseMode | None = None
        self._asleep: set[str] = set()
        self._dead: str | None = None
        self._tokens_generated = 0
        self._seconds_busy = 0.0
        self._thread = threading.Thread(target=self._serve, name="torch-engine", daemon=True)
        self._thread.start()

    async def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """See `Engine.generate`. A caller that is cancelled frees its rows."""
        for request in requests:
            self._check(request)
        if self._asleep:
            raise EngineError(f"the torch engine is asleep ({', '.join(sorted(self._asleep))}): wake it before generating")
        if not requests:
            return []
        rows, done = self._submit(requests)
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self._post(lambda: self._end(rows))
            raise

    @contextmanager
    def hold(self) -> Iterator[None]:
        """See `Engine.hold`."""
        with self._changed:
            self._held += 1
        try:
            yield
        finally:
            with self._changed:
                self._held -= 1
                self._changed.notify()

    async def pause(self, mode: PauseMode) -> None:
        """See `Engine.pause`. `abort` ends waiting requests too; requests that come later wait until `resume`."""
        await self._run(lambda: self._pause(mode))

    async def resume(self) -> None:
        await self._run(self._resume)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        wanted = None if request_ids is None else set(request_ids)
        await self._run(lambda: self._end([row for row in self._every_row() if wanted is None or row.request.request_id in wanted]))

    async def sleep(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Ends running requests and gives the KV cache back. Weights are in host memory already and stay there."""
        unknown = set(tags) - _TAGS
        if unknown:
            raise ValueError(f"sleep tags {sorted(unknown)} are unknown; valid: {', '.join(sorted(_TAGS))}")
        await self._run(lambda: self._sleep(set(tags)))

    async def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        await self._run(lambda: self._asleep.difference_update(tags))

    async def health(self) -> EngineHealth:
        return EngineHealth(
            ok=self._dead is None,
            weight_version=self._weights.version,
            running=len(self._batch.rows),
            waiting=len(self._waiting),
            tokens_generated=self._tokens_generated,
            seconds_busy=self._seconds_busy,
            detail=self._dead or "",
        )

    async def close(self) -> None:
        """Ends the decoding thread; requests that still run raise EngineError."""
        self._post(self._stop)
        await asyncio.to_thread(self._thread.join)
        self._weights.leave()

    def weight_specs(self) -> list[TensorSpec]:
        """What `weights_begin` expects, in the checkpoint's names, tied tensors once."""
        return list(self._weights.specs.values())

    def weights_version(self) -> int:
        return self._weights.version

    def weights_join(self, group: GroupSpec, rank: int) -> None:
        self._weights.join(group, rank)

    def weights_begin(self, manifest: Manifest) -> None:
        """See `WeightReceiver.weights_begin`. Generation goes on with the old weights unless `pause` was called."""
        self._weights.begin(manifest)

    def weights_receive(self, bucket: Bucket, payload: Payload) -> None:
        self._weights.receive(bucket, payload)

    def weights_prepared(self, digests: bool) -> dict[str, str]:
        return self._weights.prepared(digests)

    def weights_commit(self, version: int) -> None:
        """See `WeightReceiver.weights_commit`. Keys and values of running rows stay, unless a pause in mode `retract` dropped them."""
        self._post(lambda: self._commit(version)).result()

    def weights_abort(self) -> None:
        """See `WeightReceiver.weights_abort`. A paused engine generates again at `resume`."""
        self._weights.abort()

    # Called from any thread: hand work to the decoding thread.

    def _check(self, request: Request) -> None:
        count = len(request.prompt) + len(request.generated)
        name, context = f"request {request.request_id}", self._decoder.context
        if len(request.prompt) == 0:
            raise ValueError(f"{name}: the prompt is empty")
        if count >= context:
            raise ValueError(f"{name}: {count} tokens leave no room for a new one in a context of {context}")
        tokens = np.concatenate([request.prompt, request.generated])
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise ValueError(f"{name}: token ids span {tokens.min()}..{tokens.max()}, the vocabulary is 0..{self._vocabulary - 1}")
        if len(request.generated) >= request.sampling.max_new_tokens:
            raise ValueError(f"{name}: {len(request.generated)} tokens are generated already and max_new_tokens is {request.sampling.max_new_tokens}")

    def _submit(self, requests: Sequence[Request]) -> tuple[list[Row], Future[list[Generation]]]:
        call = _Call(requests)
        with self._changed:
            if self._dead is not None:
                raise EngineError(self._dead)
            self._waiting.extend(call.rows)
            self._changed.notify()
        return call.rows, call.done

    async def _run(self, command: Callable[[], None]) -> None:
        await asyncio.wrap_future(self._post(command))

    def _post(self, command: Callable[[], Any]) -> Future[Any]:
        """Run `command` in the decoding thread before the next token."""
        future: Future[Any] = Future()
        with self._changed:
            if self._dead is None:
                self._commands.append((command, future))
                self._changed.notify()
            else:
                future.set_exception(EngineError(self._dead))
        return future

    # In the decoding thread.

    def _serve(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while self._dead is None:
                    self._run_commands()
                    if self._may_step():
                        self._step()
        except Exception as error:  # noqa: BLE001 - whatever it was, every caller gets an EngineError and health says why
            self._die(f"the torch engine died: {type(error).__name__}: {error}")

    def _run_commands(self) -> None:
        """Wait until there is something to do, then run the commands that came since the last token, in order."""
        with self._changed:
            while not self._commands and not self._may_step():
                self._changed.wait()
            commands = list(self._commands)
            self._commands.clear()
        for command, future in commands:
            try:
                future.set_result(command())
            except Exception as error:  # noqa: BLE001 - raised where the command came from
                future.set_exception(error)

    def _may_step(self) -> bool:
        awake = self._dead is None and self._paused is None and not self._asleep
        return awake and bool(self._batch.rows or (self._waiting and not self._held))

    def _step(self) -> None:
        started = time.perf_counter()
        with self._changed:
            while self._waiting and self._batch.free and not self._held:
                self._batch.admit(self._waiting.popleft())
        finished = self._batch.step(self._weights.version)
        self._weights.check_unmoved()  # behind the step: whatever it read was there before
        self._tokens_generated += len(self._batch.rows) + len(finished)
        for row, generation in finished:
            row.deliver(generation)
        self._seconds_busy += time.perf_counter() - started

    def _pause(self, mode: PauseMode) -> None:
        self._paused = mode
        if mode == "abort":
            self._end(self._every_row())
        elif mode == "retract":
            self._batch.retract()

    def _resume(self) -> None:
        self._paused = None

    def _sleep(self, tags: set[str]) -> None:
        self._asleep |= tags
        self._end(self._every_row())
        if "kv_cache" in tags:
            self._decoder.cache.drop()

    def _commit(self, version: int) -> None:
        if self._weights.in_place:
            self._decoder.unbind()
        if self._weights.commit(version, stay=self._decoder.bound):
            self._decoder.weights_changed()

    def _every_row(self) -> list[Row]:
        with self._changed:
            return [*self._batch.rows, *self._waiting]

    def _end(self, rows: Sequence[Row]) -> None:
        """End those of `rows` that have not ended, with what they have."""
        for row in rows:
            if row in self._batch.rows:
                row.deliver(self._batch.remove(row))
                continue
            with self._changed:
                if row not in self._waiting:
                    continue
                self._waiting.remove(row)
            row.deliver(_nothing(row.request))

    def _stop(self) -> None:
        self._die("the torch engine is closed")

    def _die(self, message: str) -> None:
        rows = self._every_row()
        with self._changed:
            self._dead = message
            self._waiting.clear()
            commands = list(self._commands)
            self._commands.clear()
        for row in rows:
            row.fail(EngineError(message))
        for _, future in commands:
            future.set_exception(EngineError(message))


def load_base(model: ModelConfig) -> PreTrainedModel:
    """What an engine serves at version 0. Raises ValueError as `load_model`."""
    return load_model(model.path, getattr(torch, model.dtype), trust_remote_code=model.trust_remote_code)


class _Call:
    """One `generate` call: done when its last row is."""

    def __init__(self, requests: Sequence[Request]):
        self.done: Future[list[Generation]] = Future()
        self.done.set_running_or_notify_cancel()  # from here on only the decoding thread ends it, even if its caller is cancelled
        self._results: dict[int, Generation] = {}
        self.rows = [Row(request, functools.partial(self._deliver, index), self._fail) for index, request in enumerate(requests)]

    def _deliver(self, index: int, generation: Generation) -> None:
        self._results[index] = generation
        if len(self._results) == len(self.rows):
            self.done.set_result([self._results[i] for i in range(len(self.rows))])

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def _nothing(request: Request) -> Generation:
    return Generation(
        request_id=request.request_id,
        tokens=np.zeros(0, np.int64),
        logprobs=np.zeros(0, np.float32),
        weight_versions=np.zeros(0, np.int32),
        finish="abort",
    )
