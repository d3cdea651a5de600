"""What the engine suite needs beside an engine: transformers as the oracle, and a sender of weight updates."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollout.engines.contracts import Engine, Generation, Request, SamplingParams
from weight_sync.contracts import Bucket, FromGroup, GroupSpec, Manifest, SharedMemory, TensorSpec
from weight_sync.transports.broadcast import Listener, join

FULL = 230  # tokens of a long response in the tiny model's context of 256

T = TypeVar("T")
WAITS = (0.3, 0.1, 0.6, 0.05, 1.0)  # shares of the time of a full response

Tensors = dict[str, torch.Tensor]
Payload = SharedMemory | FromGroup


class Bench:
    """An engine, which after `settle` serves the weights of `folder`, whatever the tests before did with it."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.base: Tensors = load_file(folder / "model.safetensors")
        self.end = 3  # <|im_end|> of the tiny tokenizer
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._full_s = 0.0
        self._wait = WAITS[0]
        self._settled_at = 0  # an engine starts with the weights of its folder at version 0

    @property
    def version(self) -> int:
        return self.engine.weights_version()

    def generate(self, *requests: Request) -> list[Generation]:
        return asyncio.run(self.engine.generate(requests))

    def caught(self, attempt: Callable[[], T], in_time: Callable[[T], bool]) -> T:
        """What `attempt` returns, made again with other waits while `in_time` says that it came too late or too early.

        SGLang makes a full response in a fraction of a second, and its client cannot see how far it is: on a busy machine the response
        may be over, or not yet begun, when the call that should reach it halfway arrives.
        """
        for self._wait in WAITS:
            made = attempt()
            if in_time(made):
                break
        self._wait = WAITS[0]
        return made

    async def under_way(self, *calls: Sequence[Request]) -> list[asyncio.Task[list[Generation]]]:
        """Start one `generate` call for each of `calls` and return while they run, after a few tokens and long before the last.

        The torch engine counts tokens as they are made; SGLang's client only sees them at the end, so there a part of the time
        must pass that a full response was seen to take.
        """
        enough = (await self.engine.health()).tokens_generated + 4 * sum(len(call) for call in calls)
        tasks = [asyncio.ensure_future(self.engine.generate(call)) for call in calls]
        deadline = time.perf_counter() + self._wait * self._full_s
        while (await self.engine.health()).tokens_generated < enough and time.perf_counter() < deadline:
            await asyncio.sleep(0.001)
        return tasks

    def oracle(self, request: Request, tokens: Sequence[int] | np.ndarray, weights: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """float32 [R, V]: transformers' log-probs at the request's temperature, one full forward, for the response `tokens`."""
        self._model.load_state_dict(dict(weights or self.base), strict=False)
        sequence = np.concatenate([request.prompt, request.generated, tokens])
        with torch.no_grad():
            logits = self._model(torch.tensor(sequence)[None]).logits[0].float()
        return torch.log_softmax(logits[-len(tokens) - 1 : -1] / (request.sampling.temperature or 1.0), -1)

    def gap(self, request: Request, made: Generation, weights: Mapping[str, torch.Tensor] | None = None) -> float:
        """The largest difference between the engine's log-probs and the oracle's."""
        expected = self.oracle(request, made.tokens, weights).gather(1, torch.tensor(made.tokens)[:, None])[:, 0]
        return float((expected - torch.tensor(made.logprobs)).abs().max())

    def send(self, tensors: Tensors, folder: Path, *, broadcast: bool = False, version: int | None = None, buckets: int | None = None) -> Manifest:
        """`weights_begin`, then the first `buckets` buckets (all when None), of four tensors each. The caller ends the update."""
        manifest = manifest_of(tensors, self.version + 1 if version is None else version)
        with self.payloads(manifest.buckets[:buckets], tensors, folder, broadcast) as payloads:
            self.engine.weights_begin(manifest)
            for bucket in manifest.buckets[:buckets]:
                self.engine.weights_receive(bucket, payloads(bucket))
        return manifest

    def publish(self, tensors: Tensors, folder: Path, *, broadcast: bool = False) -> dict[str, str]:
        """A whole update; returns the digests."""
        manifest = self.send(tensors, folder, broadcast=broadcast)
        digests = self.engine.weights_prepared(True)
        self.engine.weights_commit(manifest.version)
        return digests

    def settle(self, folder: Path) -> None:
        self.release()
        if not self._full_s:
            self._full_s = min(self._seconds_of_a_full_response() for _ in range(3))  # the first also warms up
        if self.version != self._settled_at:
            self.publish(self.base, folder)
            self._settled_at = self.version

    def _seconds_of_a_full_response(self) -> float:
        started = time.perf_counter()
        self.generate(request(new=FULL))
        return time.perf_counter() - started

    def release(self) -> None:
        """No update open, generating."""
        self.engine.weights_abort()
        asyncio.run(self.engine.resume())

    @contextmanager
    def payloads(self, buckets: Sequence[Bucket], tensors: Tensors, folder: Path, broadcast: bool = False) -> Iterator[Callable[[Bucket], Payload]]:
        """What to hand to `weights_receive` for each of `buckets`; a broadcasting sender leaves after the last of them."""
        if broadcast:
            with self._group(buckets, tensors):
                yield lambda bucket: FromGroup()
        else:
            yield lambda bucket: _written(bucket, tensors, folder)

    @contextmanager
    def _group(self, buckets: Sequence[Bucket], tensors: Tensors) -> Iterator[None]:
        """Rank 0 in a thread: sends to the engine, which is rank 1."""
        listener = Listener("127.0.0.1", 60)
        spec = GroupSpec("127.0.0.1", listener.port, 2, f"test-{listener.port}", "gloo", 60)

        def run() -> None:
            group = join(spec, 0, listener)
            for bucket in buckets:
                group.send(bucket, [tensors[t.name] for t in bucket.tensors])
            group.close()

        sender = threading.Thread(target=run, daemon=True)
        sender.start()
        self.engine.weights_join(spec, 1)
        yield
        sender.join(60)


def request(
    length: int = 8, *, new: int = 16, seed: int = 0, start: int = 10, generated: Sequence[int] = (), name: str | None = None, **sampling: object
) -> Request:
    """A prompt of `length` consecutive letters."""
    prompt = np.arange(start, start + length) % 26 + 9
    params = SamplingParams(max_new_tokens=new, seed=seed, **sampling)  # type: ignore[arg-type]
    return Request(request_id=name or f"{start}/{seed}", prompt=prompt, sampling=params, generated=np.asarray(generated, np.int64))


def changed(tensors: Tensors, seed: int = 1) -> Tensors:
    """The same tensors after a large random step: log-probs move by far more than the tolerance."""
    generator = torch.Generator().manual_seed(seed)
    return {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


def manifest_of(tensors: Tensors, version: int, size: int = 4) -> Manifest:
    specs = [TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
    return Manifest(version, tuple(Bucket(i, tuple(specs[i * size : (i + 1) * size])) for i in range(-(-len(specs) // size))))


def _written(bucket: Bucket, tensors: Tensors, folder: Path) -> SharedMemory:
    path = folder / f"bucket-{secrets.token_hex(4)}"
    torch.cat([tensors[t.name].reshape(-1) for t in bucket.tensors]).numpy().tofile(path)
    return SharedMemory(str(path), path.stat().st_size)
