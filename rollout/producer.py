"""The rollout side of the loop: claims prompts, keeps a bounded number of groups in flight, and hands out batches.

Capacity is the one rule. Groups in flight or waiting in the buffer are at most

    prompts_per_step x (max_staleness + 1)   while the trainer waits for a batch
    prompts_per_step x max_staleness         while it trains

so that at 0 the engines are idle while the trainer works, and at k they are up to k batches ahead.

At 0 a round may also begin with `extra_prompts` more groups than a batch needs: the first that finish are the batch, and the tail, for which
everybody else would wait, is aborted and tried again first thing in the next round.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.data.order import refuse_other_data
from miles.data.prompts import PromptStream
from miles.data.types import Group
from rollout.actor import GroupResult, GroupTask
from rollout.buffer import Buffer
from rollout.claim_table import Outcome
from rollout.claims import Claims
from rollout.engines.contracts import SamplingParams
from rollout.filters import diagnosis, teaches_nothing
from rollout.fleet import Fleet

logger = logging.getLogger(__name__)

Sampler = Callable[[int], tuple[SamplingParams, ...]]
"""claim_id -> the sampling parameters (seeds included) of the group's samples."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A step's batch, by claim, and what was counted since the last one, by the names of `miles/tracking/names.py`."""

    groups: tuple[Group, ...]
    counts: dict[str, float]


@dataclass(kw_only=True)
class Producer:
    """Driver-side; all methods run on one event loop.

    Attributes:
        heal: brings dead engines back at the current weights; called while the trainer is idle.
        submitted: told of the claims that engines have just been given, retried ones too.
        made_by: digest of the options that groups are sampled and rewarded by. Groups that wait in a checkpoint and were made by others would be
            trained by a temperature, rewards or turns that are not this run's: they are generated again.
    """

    stream: PromptStream
    claims: Claims
    buffer: Buffer
    fleet: Fleet
    sampler: Sampler
    prompts_per_step: int
    max_staleness: int
    timeout_s: float
    dynamic_sampling: bool
    max_sampling_rounds: int
    heal: Callable[[], Awaitable[None]]
    submitted: Callable[[Sequence[int]], None] | None = None
    extra_prompts: int = 0
    made_by: str = ""
    _counts: Counter[str] = field(default_factory=Counter)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _filtered: list[Group] = field(default_factory=list)
    _waiting: list[int] = field(default_factory=list)
    _in_flight: set[int] = field(default_factory=set)
    _refused_lengths: list[int] = field(default_factory=list)
    _error: BaseException | None = None
    _failures_in_a_row: int = 0

    async def take(self, version: int) -> Taken:
        """The next `prompts_per_step` groups that are young enough for `version`.

        Raises:
            RuntimeError: dynamic sampling found no groups that teach anything, or nothing but failures came back.
            Exception: whatever a reward function kept raising, with its traceback.
        """
        kept: list[Group] = []
        while True:
            self._changed.clear()
            self._raise_error()
            kept += self.buffer.take(self.prompts_per_step - len(kept), version, self.max_staleness)
            self._end_refused()
            if len(kept) == self.prompts_per_step:
                break
            if self.fleet.dead_ids:
                await self.heal()
            # At 0 a round is refilled only when it is over: which groups share a batch then never depends on timing.
            if self.max_staleness > 0 or not self._in_flight:
                self._check_rounds()
                self._fill(self.prompts_per_step * (self.max_staleness + 1) + self.extra_prompts - len(kept))
            await self._changed.wait()
        if self.extra_prompts:
            await self._abort_tail()
        if self.max_staleness:
            self._fill(self.prompts_per_step * self.max_staleness)
        return Taken(groups=tuple(sorted(kept, key=lambda g: g.claim_id)), counts=self._drain_counts())

    def trained(self, groups: Sequence[Group]) -> None:
        """The update that used `groups` has happened: their claims end."""
        for group in groups:
            self.claims.end(group.claim_id, Outcome.TRAINED)

    @property
    def in_flight(self) -> int:
        """Groups that engines are at work on."""
        return len(self._in_flight)

    def state_dict(self) -> dict[str, Any]:
        """JSON: what a resumed run needs to skip no prompt and repeat none. Groups that were in flight are generated again."""
        return {"claims": self.claims.state_dict(), "buffer": self.buffer.state_dict(), "stream": self.stream.fingerprint, "made_by": self.made_by}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ConfigError where the prompts or their order are not those that the claims were made on."""
        refuse_other_data(state["stream"], self.stream.fingerprint)
        self.claims.load_state_dict(state["claims"])
        self.buffer.load_state_dict(state["buffer"], self.stream.prompt)
        if state.get("made_by", self.made_by) != self.made_by and len(self.buffer):
            logger.warning("--resume: %d groups that wait were sampled or rewarded by other options, and are generated again", len(self.buffer))
            self.buffer = Buffer()
        buffered = set(self.buffer.claim_ids())
        self._waiting = [claim_id for claim_id in self.claims.in_flight() if claim_id not in buffered]

    async def _abort_tail(self) -> None:
        """What still runs ends. A group that was done meanwhile waits in the buffer, and is too old for the next version."""
        self.fleet.abort(sorted(self._in_flight))
        while self._in_flight:
            self._changed.clear()
            self._raise_error()
            await self._changed.wait()
        self._raise_error()

    def _fill(self, capacity: int) -> None:
        """Start groups until `capacity` of them are in flight or buffered."""
        missing = capacity - len(self._in_flight) - len(self.buffer)
        if missing <= 0 or not self.fleet.engine_ids:
            return
        self._waiting.sort()  # they came back in whatever order their attempts ended
        again, self._waiting = self._waiting[:missing], self._waiting[missing:]
        self._submit(again + [self.claims.claim() for _ in range(missing - len(again))])

    def _submit(self, claim_ids: Sequence[int]) -> None:
        tasks = [GroupTask(claim_id=c, prompt=self.stream.prompt(c), sampling=self.sampler(c), timeout_s=self.timeout_s) for c in claim_ids]
        self._in_flight.update(claim_ids)
        for future in self.fleet.submit(tasks, balanced=self.max_staleness > 0):
            future.add_done_callback(self._on_done)
        if self.submitted is not None:
            self.submitted(claim_ids)

    def _on_done(self, future: asyncio.Future[GroupResult]) -> None:
        """Whatever is raised here ends the run: the event loop would only log it, and `take` wait for a group that is lost."""
        self._changed.set()
        try:
            self._receive(future.result())
        except Exception as error:  # noqa: BLE001 - `take` raises it
            self._error = error

    def _receive(self, result: GroupResult) -> None:
        self._in_flight.discard(result.claim_id)
        if result.group is None:
            self._on_failure(result)
            return
        self._failures_in_a_row = 0
        if self.dynamic_sampling and teaches_nothing(result.group):
            self.claims.end(result.claim_id, Outcome.FILTERED)
            self._filtered.append(result.group)
        else:
            self.buffer.put(result.group)

    def _on_failure(self, result: GroupResult) -> None:
        if result.kind == "aborted":
            self._counts["groups/aborted"] += 1
            self._again(result.claim_id, Outcome.EXHAUSTED)
            return
        self._failures_in_a_row += 1
        self._counts["groups/failed"] += 1
        logger.warning("prompt %d (claim %d) %s: %s", self.stream.prompt(result.claim_id).prompt_id, result.claim_id, result.kind, result.message)
        self._again(result.claim_id, Outcome.FAILED)
        if self._failures_in_a_row >= 8 * self.prompts_per_step:
            self._error = RuntimeError(f"{self._failures_in_a_row} groups failed in a row, the last one with: {result.message}")

    def _end_refused(self) -> None:
        """Groups refused as too old are generated again under the current weights, as long as they have attempts left."""
        for group in self.buffer.drain_refused():
            self._counts["groups/refused_stale"] += 1
            self._refused_lengths += [sample.response_length for sample in group.samples]
            self._again(group.claim_id, Outcome.EXHAUSTED)

    def _again(self, claim_id: int, last: Outcome) -> None:
        if self.claims.retry(claim_id, last):
            self._waiting.append(claim_id)
        else:
            self._counts["groups/exhausted"] += 1

    def _check_rounds(self) -> None:
        if len(self._filtered) >= self.prompts_per_step * self.max_sampling_rounds:
            raise RuntimeError(
                f"dynamic sampling: algorithm.max_sampling_rounds = {self.max_sampling_rounds} batches of {self.prompts_per_step} groups did not fill one "
                f"batch. {diagnosis(self._filtered)}, or set algorithm.dynamic_sampling = false"
            )

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _drain_counts(self) -> dict[str, float]:
        counts = {name: float(self._counts[name]) for name in ("groups/failed", "groups/aborted", "groups/exhausted", "groups/refused_stale")}
        counts["groups/filtered"] = float(len(self._filtered))
        counts |= {"queue/in_flight": float(len(self._in_flight)), "queue/buffered": float(len(self.buffer))}
        if self._refused_lengths:
            counts["length/refused_mean"] = sum(self._refused_lengths) / len(self._refused_lengths)
            self._refused_lengths.clear()
        self._counts.clear()
        self._filtered.clear()
        return counts
