"""The claim table: one word per task, changed by compare-and-swap alone, so that many workers share the tasks and each task ends once.

A word is {state, owner, version, attempts, outcome}. Its version grows with every change, and a claim is the version it made: whoever lost
its claim, by a lease that ran out, can no longer end it, even where the same owner has claimed the task anew (DwT-FL's task word; the version
is a fencing token). Claims, ends and releases are one SQLite transaction each, on disk before they are answered, so a host that is killed
comes back to the words it had answered with. Every method may be called again when its answer was lost and then answers the same.

    EMPTY -- claim --> PENDING -- end --> COMMITTED
      ^------- release, leave, expiry ------'           (after the last attempt: COMMITTED as exhausted)
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import ray

Key = int | str


class Outcome(StrEnum):
    """How a claim ended."""

    TRAINED = "trained"  # an update used its group
    FILTERED = "filtered"  # its group teaches nothing
    FAILED = "failed"  # given up after max_attempts, of which the last failed: an engine died, a reward raised, a deadline passed
    EXHAUSTED = "exhausted"  # given up after max_attempts, of which the last was aborted, came too late or was let go


class State(IntEnum):
    EMPTY = 0  # nobody's
    PENDING = 1  # its owner is at work
    COMMITTED = 2  # ended


class Word(NamedTuple):
    """What the table knows of one task."""

    state: State
    owner: str
    version: int
    attempts: int
    outcome: Outcome | None


class Claim(NamedTuple):
    """The right to end a task, for as long as its word has this version."""

    key: Key
    owner: str
    version: int


_SCHEMA = """
CREATE TABLE IF NOT EXISTS words (
    position INTEGER PRIMARY KEY, key UNIQUE NOT NULL, state INTEGER NOT NULL DEFAULT 0, owner TEXT NOT NULL DEFAULT '',
    version INTEGER NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0, outcome TEXT);
CREATE INDEX IF NOT EXISTS by_state ON words (state, position);
CREATE INDEX IF NOT EXISTS by_owner ON words (owner, position) WHERE state = 1;
"""


class ClaimTable:
    """One process has it open, its host; workers call that one (`host_table`).

    Args:
        path: the file, or ":memory:" for a table that ends with its process.
        lease_s: how long an owner may be silent before others may have its tasks, in seconds of the host's monotonic clock. After a
            restart of the host every owner has a whole lease again: a takeover comes later by that, never earlier.
        max_attempts: claims that may come to nothing before the task ends as exhausted. Leaving does not count.
    Raises:
        sqlite3.OperationalError: another process has the file open.

    Example: `add([7])`; `c = claim("a", 7)` has version 1, and `claim("b", 7)` is None. "a" falls silent; after lease_s `claim("b", 7)`
    has version 3 (the release was 2), `end(c, TRAINED)` is False and b's is True.
    """

    def __init__(
        self, path: Path | str = ":memory:", *, lease_s: float = math.inf, max_attempts: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert lease_s > 0
        assert max_attempts is None or max_attempts >= 1
        self._lease_s, self._max_attempts, self._clock = lease_s, max_attempts, clock
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL")  # a torn tail fails its checksum and is dropped
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(_SCHEMA)
        owners = self._db.execute("SELECT DISTINCT owner FROM words WHERE state = 1").fetchall()
        self._deadlines = {owner: clock() + lease_s for (owner,) in owners}

    def add(self, keys: Sequence[Key], attempts: int = 0) -> None:
        """Tasks to be done, in this order, each tried `attempts` times before; those that are there already stay as they are."""
        with self._change():
            self._db.executemany("INSERT OR IGNORE INTO words (key, attempts) VALUES (?, ?)", [(key, attempts) for key in keys])

    def heartbeat(self, owner: str) -> list[Claim]:
        """Join, or stay. Returns what `owner` still holds: work on any other task is to be dropped, since it may be another's by now."""
        with self._change():
            self._renew(owner)
            return self._held(owner)

    def claim(self, owner: str, key: Key) -> Claim | None:
        """The task is `owner`'s, won now or before; None: it is another's, or has ended."""
        claims, _ = self.claim_among(owner, [key], 1)
        return claims[0] if claims else None

    def claim_among(self, owner: str, keys: Sequence[Key], n: int) -> tuple[list[Claim], list[Key]]:
        """The first `n` of these tasks that are `owner`'s, won now or before, and those of `keys` that have ended."""
        with self._change():
            self._renew(owner)
            words = [(key, self._word(key)) for key in keys]
            mine = [(key, w) for key, w in words if w.state is State.EMPTY or (w.state is State.PENDING and w.owner == owner)][:n]
            claims = [Claim(key, owner, w.version) if w.state is State.PENDING else self._take(owner, key, w.version) for key, w in mine]
            return claims, [key for key, w in words if w.state is State.COMMITTED]

    def fill(self, owner: str, n: int) -> list[Claim]:
        """What `owner` holds, topped up to `n` tasks with the first that are nobody's."""
        with self._change():
            self._renew(owner)
            held = self._held(owner)
            free = self._db.execute("SELECT key, version FROM words WHERE state = 0 ORDER BY position LIMIT ?", (max(0, n - len(held)),)).fetchall()
            return held + [self._take(owner, key, version) for key, version in free]

    def release(self, claim: Claim, last: Outcome = Outcome.EXHAUSTED) -> Word:
        """The attempt came to nothing. Returns the word: EMPTY for another attempt, or, of the last, COMMITTED as `last`. That of a claim already lost
        is left alone."""
        with self._change():
            self._let_go(claim, last)
            return self._word(claim.key)

    def end(self, claim: Claim, outcome: Outcome) -> bool:
        """Whether the task ended by this claim. False: it was lost before, so nothing that was made under it may be used."""
        with self._change():
            if self._swap(claim, State.COMMITTED, claim.owner, outcome=outcome):
                return True
            word = self._word(claim.key)
            return (word.state, word.owner, word.version, word.outcome) == (State.COMMITTED, claim.owner, claim.version + 1, outcome)

    def leave(self, owner: str) -> None:
        """`owner` goes in good order, and its tasks are free at once."""
        with self._change():
            for claim in self._held(owner):
                self._swap(claim, State.EMPTY, "", attempts=-1)
            self._deadlines.pop(owner, None)

    def word(self, key: Key) -> Word:
        """Raises KeyError where there is no such task."""
        with self._change():
            return self._word(key)

    def forget(self, key: Key) -> None:
        """Drop an ended task. For keys that never come again: were this one added anew, it would be done anew."""
        with self._change():
            self._db.execute("DELETE FROM words WHERE key = ? AND state = 2", (key,))

    def counts(self) -> dict[str, int]:
        """Tasks by what they are: empty, pending, or the outcome they ended in."""
        with self._change():
            rows = self._db.execute("SELECT state, outcome, COUNT(*) FROM words GROUP BY state, outcome").fetchall()
        return {outcome or State(state).name.lower(): count for state, outcome, count in rows}

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """One transaction, after those whose lease is over have lost what they held."""
        with self._lock:
            for owner in [owner for owner, deadline in self._deadlines.items() if deadline <= self._clock()]:
                with self._transaction():
                    for claim in self._held(owner):
                        self._let_go(claim)
                del self._deadlines[owner]
            with self._transaction():
                yield

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _renew(self, owner: str) -> None:
        self._deadlines[owner] = self._clock() + self._lease_s

    def _held(self, owner: str) -> list[Claim]:
        rows = self._db.execute("SELECT key, version FROM words WHERE state = 1 AND owner = ? ORDER BY position", (owner,)).fetchall()
        return [Claim(key, owner, version) for key, version in rows]

    def _word(self, key: Key) -> Word:
        row = self._db.execute("SELECT state, owner, version, attempts, outcome FROM words WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise KeyError(key)
        state, owner, version, attempts, outcome = row
        return Word(State(state), owner, version, attempts, Outcome(outcome) if outcome else None)

    def _take(self, owner: str, key: Key, version: int) -> Claim:
        self._db.execute(
            "UPDATE words SET state = 1, owner = ?, version = version + 1, attempts = attempts + 1 WHERE key = ? AND state = 0 AND version = ?",
            (owner, key, version),
        )
        return Claim(key, owner, version + 1)

    def _let_go(self, claim: Claim, last: Outcome = Outcome.EXHAUSTED) -> None:
        if self._max_attempts is not None and self._word(claim.key).attempts >= self._max_attempts:
            self._swap(claim, State.COMMITTED, claim.owner, outcome=last)
        else:
            self._swap(claim, State.EMPTY, "")

    def _swap(self, claim: Claim, state: State, owner: str, *, outcome: Outcome | None = None, attempts: int = 0) -> bool:
        """The compare-and-swap: from exactly this claim, or not at all."""
        cursor = self._db.execute(
            "UPDATE words SET state = ?, owner = ?, outcome = ?, version = version + 1, attempts = attempts + ? "
            "WHERE key = ? AND state = 1 AND owner = ? AND version = ?",
            (int(state), owner, outcome, attempts, claim.key, claim.owner, claim.version),
        )
        return cursor.rowcount == 1


class Remote:
    """An actor's methods as plain calls, for code that may have the object itself as well."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._actor, name)
        return lambda *args: ray.get(method.remote(*args))


def host_table(path: Path | str, *, lease_s: float, max_attempts: int | None = None, kind: type[ClaimTable] = ClaimTable) -> Any:
    """A Ray actor that keeps the table in `path`. Ray starts it again when its process dies, and calls that it had not answered are made again."""
    return ray.remote(kind).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote(path, lease_s=lease_s, max_attempts=max_attempts)
