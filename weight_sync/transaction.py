"""One weight update as a transaction: every engine serves version v until the journal says v+1, and v+1 after it.

setup, pause, begin, send, prepared, compare digests      any failure here: abort, every living engine goes on at v
---- journal ----
commit, resume                                            any failure here: that engine is dead, the others serve v+1
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weight_sync.buckets import plan
from weight_sync.config import WeightSyncConfig
from weight_sync.contracts import Manifest, WeightSyncError
from weight_sync.digests import fingerprint
from weight_sync.gather import export_specs
from weight_sync.journal import Entry, Journal
from weight_sync.parties import Engines, Sent, Trainer, call_all, call_each, call_trainer, reason
from weight_sync.transports.registry import make_transport


@dataclass(frozen=True, kw_only=True)
class PublishResult:
    """What an update did.

    Attributes:
        seconds: wall clock of the whole update. bytes: what left the trainer, once however many engines took it.
        digests_compared: tensors times engines whose bytes were compared with the trainer's.
        dead: engines that did not commit, with the reason. They are in an unknown state: replace them, then `catch_up`.
    """

    version: int
    seconds: float
    bytes: int
    digests_compared: int
    dead: dict[int, str] = field(default_factory=dict)


class UpdateAborted(WeightSyncError):
    """The update failed before the journal entry: living engines serve the old version. `dead`: engines that did not even abort."""

    def __init__(self, message: str, dead: dict[int, str]) -> None:
        super().__init__(message)
        self.dead = dead


class WeightSync:
    """Publishes the trainer's weights to the engines. Runs on the driver; one update at a time.

    Args:
        address, backend: of the broadcast group, see BroadcastTransport.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        journal_path: Path,
        trainer: Trainer,
        engines: Engines,
        *,
        address: str = "127.0.0.1",
        backend: str = "gloo",
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._engines = engines
        self._journal = Journal(journal_path)
        self._transport = make_transport(config, trainer, engines, journal=journal_path, address=address, backend=backend)
        self._verified: set[int] = set()
        self._lock = asyncio.Lock()

    @property
    def version(self) -> int | None:
        """The version that engines serve by the journal; None before the first."""
        return self._journal.last.version if self._journal.last else None

    async def publish(self, version: int) -> PublishResult:
        """Bring every engine to the trainer's present weights and call them `version`.

        Raises:
            UpdateAborted: something failed before the journal entry; the old version is served.
            WeightSyncError: `version` is not newer than the journal's, or there is no engine; nothing was touched.
        """
        async with self._lock:
            if self.version is not None and version <= self.version:
                raise WeightSyncError(f"version {version} is not newer than version {self.version}, which the engines serve: publish {self.version + 1}")
            engine_ids = tuple(self._engines.engine_ids)
            if not engine_ids:
                raise WeightSyncError(f"version {version}: no engine is up to receive it")
            return await self._update(version, engine_ids, joining=False)

    async def catch_up(self, engine_id: int) -> PublishResult:
        """Bring one engine, new or replaced, to the journal's version. The trainer must not have trained on since it published that.

        Raises:
            UpdateAborted: the engine failed, or the trainer's weights are no longer those of the journal's version (noticed unless
                `verify = "never"`): then the engine waits for the next `publish`.
            WeightSyncError: nothing was published yet.
        """
        async with self._lock:
            if self.version is None:
                raise WeightSyncError(f"engine {engine_id} cannot catch up: no version was published yet")
            self._verified.discard(engine_id)
            await self._transport.close()  # the engine may be a new process under an old number
            return await self._update(self.version, (engine_id,), joining=True)

    def rewind(self, version: int) -> None:
        """The trainer was restored from a checkpoint of `version`: count from there. Engines then need `catch_up` before they serve."""
        self._journal.append(Entry(version=version, kind="rewind"))
        self._verified.clear()

    async def close(self) -> None:
        """Leave no file, group or task behind."""
        await self._transport.close()
        self._journal.close()

    async def _update(self, version: int, engine_ids: tuple[int, ...], *, joining: bool) -> PublishResult:
        started = time.monotonic()
        manifest = await self._manifest(version)
        paused = False
        try:
            await self._transport.setup(engine_ids, manifest)
            paused = True
            await self._on_all(engine_ids, "pause", self._config.pause)
            await self._on_all(engine_ids, "weights_begin", manifest)
            sent = await self._transport.send(manifest, self._config.verify != "never")
            compared = await self._compare(engine_ids, sent.digests)
            if joining:
                self._check_still_published(version, sent.digests)
            else:
                self._journal.append(self._entry(manifest, sent, engine_ids))
        except Exception as error:  # whatever it was, engines must be left on the old weights; it is raised on
            dead = await self._abort(engine_ids, paused)
            where = f"engine {engine_ids[0]} catching up with version {version}" if joining else f"update from version {self.version} to {version}"
            raise UpdateAborted(f"{where}: {reason(error)}", dead) from error
        except asyncio.CancelledError:
            await self._abort(engine_ids, paused)
            raise
        dead = await self._commit(engine_ids, version)
        self._verified |= {i for i in engine_ids if compared}
        self._verified -= set(dead)
        if dead:
            await self._transport.close()
        return PublishResult(version=version, seconds=time.monotonic() - started, bytes=sent.bytes, digests_compared=compared, dead=dead)

    async def _manifest(self, version: int) -> Manifest:
        exports = await call_trainer(self._trainer, self._config.timeout_s, export_specs)
        for rank, specs in enumerate(exports):
            if specs != exports[0]:
                first = next((b or a for a, b in zip(exports[0], specs, strict=False) if a != b), None)
                raise WeightSyncError(f"version {version}: rank {rank} exports other tensors than rank 0; the first that differs: {first}")
        return plan(version, exports[0], self._config.bucket_mb)

    async def _compare(self, engine_ids: Sequence[int], sent: dict[str, str]) -> int:
        """Every engine says that all is there; returns how many digests were compared."""
        wanted = self._config.verify == "always" or (self._config.verify == "first" and not self._verified.issuperset(engine_ids))
        received = await self._on_all(engine_ids, "weights_prepared", wanted)
        if not wanted:
            return 0
        for engine_id, digests in received.items():
            for name in sorted(sent.keys() | digests.keys()):
                if sent.get(name) != digests.get(name):
                    raise WeightSyncError(
                        f"engine {engine_id} holds other bytes of tensor {name!r} than the trainer sent: "
                        f"xxh3 {digests.get(name, 'missing')}, sent {sent.get(name, 'nothing')}"
                    )
        return len(sent) * len(engine_ids)

    def _check_still_published(self, version: int, sent: dict[str, str]) -> None:
        published = self._journal.last.fingerprint if self._journal.last else ""
        if sent and published and fingerprint(sent) != published:
            raise WeightSyncError(
                f"the trainer's weights are no longer those published as version {version} (fingerprint {fingerprint(sent)}, journal {published})"
            )

    def _entry(self, manifest: Manifest, sent: Sent, engine_ids: tuple[int, ...]) -> Entry:
        return Entry(
            version=manifest.version,
            kind="publish",
            fingerprint=fingerprint(sent.digests) if sent.digests else "",
            bytes=sent.bytes,
            tensors=len(manifest.tensors),
            engines=engine_ids,
        )

    async def _commit(self, engine_ids: Sequence[int], version: int) -> dict[int, str]:
        dead = await self._failures(engine_ids, "weights_commit", version)
        return dead | await self._failures([i for i in engine_ids if i not in dead], "resume")

    async def _abort(self, engine_ids: Sequence[int], paused: bool) -> dict[int, str]:
        """Every living engine back on its old version and generating; nothing in flight. Returns the engines that are not."""
        dead = await self._failures(engine_ids, "weights_abort")
        await self._transport.close()
        if paused:
            dead |= await self._failures([i for i in engine_ids if i not in dead], "resume")
        self._verified -= set(dead)
        return dead

    async def _on_all(self, engine_ids: Sequence[int], method: str, *args: object) -> dict[int, Any]:
        return await call_all(self._engines, engine_ids, self._config.timeout_s, method, *args)

    async def _failures(self, engine_ids: Sequence[int], method: str, *args: object) -> dict[int, str]:
        results = await call_each(self._engines, engine_ids, self._config.timeout_s, method, *args)
        return {i: f"{method}: {reason(r)}" for i, r in results.items() if isinstance(r, BaseException)}
