"""The claim table under kills, paused clocks and workers at once: every task ends once, by whoever held it at that moment."""

import sqlite3
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollout.claim_table import Claim, ClaimTable, Outcome, State
from tests.rollout.linearisable import Call, linearisable

OWNERS = ("a", "b", "c")
LEASE_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Workers(RuleBasedStateMachine):
    """Workers that claim, end, give back, sleep past their lease and wake with old claims, on a host that is killed at any moment.

    The model is who holds what, as a dictionary, and until when each owner may be silent.
    """

    @initialize(max_attempts=st.sampled_from([None, 2]))
    def start(self, max_attempts):
        self.max_attempts = max_attempts
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.table = self.opened()
        self.table.add([0, 1, 2])
        self.holder: dict[int, str | None] = dict.fromkeys(range(3))
        self.held: dict[int, Claim] = {}
        self.tries = dict.fromkeys(range(3), 0)
        self.ended: dict[int, Outcome] = {}
        self.until: dict[str, float] = {}
        self.stale: list[Claim] = []

    def opened(self) -> ClaimTable:
        return ClaimTable(Path(self.folder.name) / "claims.db", lease_s=LEASE_S, max_attempts=self.max_attempts, clock=self.clock)

    def teardown(self):
        if hasattr(self, "table"):
            self.table.close()
            self.folder.cleanup()

    def lose(self, key: int, *, counts: bool = True) -> None:
        self.stale.append(self.held.pop(key))
        self.holder[key] = None
        if not counts:
            self.tries[key] -= 1
        elif self.max_attempts is not None and self.tries[key] >= self.max_attempts:
            self.ended[key] = Outcome.EXHAUSTED

    def gain(self, owner: str, claim: Claim) -> None:
        self.holder[claim.key], self.held[claim.key] = owner, claim
        self.tries[claim.key] += 1

    def expire(self) -> None:
        for owner in [o for o, until in self.until.items() if until <= self.clock.now]:
            del self.until[owner]
            for key in [k for k, holder in self.holder.items() if holder == owner]:
                self.lose(key)

    @rule(owner=st.sampled_from(OWNERS), key=st.integers(0, 2))
    def claim(self, owner, key):
        self.expire()
        claim = self.table.claim(owner, key)
        self.until[owner] = self.clock.now + LEASE_S
        if key not in self.ended and self.holder[key] is None:
            assert claim is not None
            self.gain(owner, claim)
        else:
            assert claim == (self.held[key] if self.holder[key] == owner else None)

    @rule(owner=st.sampled_from(OWNERS), n=st.integers(0, 3))
    def fill(self, owner, n):
        self.expire()
        claims = self.table.fill(owner, n)
        self.until[owner] = self.clock.now + LEASE_S
        mine = [k for k, holder in self.holder.items() if holder == owner]
        free = [k for k, holder in self.holder.items() if holder is None and k not in self.ended]
        new = free[: max(0, n - len(mine))]
        assert [c.key for c in claims] == mine + new
        for claim in claims:
            if claim.key in new:
                self.gain(owner, claim)

    @rule(owner=st.sampled_from(OWNERS))
    def heartbeat(self, owner):
        self.expire()
        claims = self.table.heartbeat(owner)
        self.until[owner] = self.clock.now + LEASE_S
        assert claims == [self.held[k] for k, holder in self.holder.items() if holder == owner]

    @rule(key=st.integers(0, 2), outcome=st.sampled_from([Outcome.TRAINED, Outcome.FILTERED]))
    def end(self, key, outcome):
        claim = self.held.get(key)
        self.expire()
        if claim is None:
            return
        if key in self.held:
            # Twice: the answer to the first may have been lost.
            assert self.table.end(claim, outcome)
            assert self.table.end(claim, outcome)
            del self.held[key]
            self.holder[key] = None
            self.ended[key] = outcome
        else:
            assert not self.table.end(claim, outcome)

    @rule(key=st.integers(0, 2))
    def give_back(self, key):
        claim = self.held.get(key)
        self.expire()
        if claim is not None:
            self.table.release(claim)
            if key in self.held:
                self.lose(key)

    @rule(data=st.data())
    def a_sleeper_wakes(self, data):
        if self.stale:
            assert not self.table.end(data.draw(st.sampled_from(self.stale)), Outcome.TRAINED)
            self.expire()

    @rule(owner=st.sampled_from(OWNERS))
    def leave(self, owner):
        self.expire()
        self.table.leave(owner)
        self.until.pop(owner, None)
        for key in [k for k, holder in self.holder.items() if holder == owner]:
            self.lose(key, counts=False)

    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S]))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @rule()
    def host_is_killed(self):
        self.table.close()
        self.table = self.opened()
        self.until = {holder: self.clock.now + LEASE_S for holder in self.holder.values() if holder is not None}

    @invariant()
    def every_word_is_the_models(self):
        if not hasattr(self, "table"):
            return
        self.expire()
        for key in range(3):
            word = self.table.word(key)
            assert word.attempts == self.tries[key]
            if key in self.ended:
                assert (word.state, word.outcome) == (State.COMMITTED, self.ended[key])
            else:
                assert (word.state, word.owner) == ((State.PENDING, self.holder[key]) if self.holder[key] else (State.EMPTY, ""))


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_the_worked_example_of_the_docstring():
    clock = Clock()
    table = ClaimTable(lease_s=LEASE_S, clock=clock)
    table.add([7])
    first = table.claim("a", 7)
    assert (first.version, table.claim("b", 7)) == (1, None)
    clock.now += LEASE_S
    second = table.claim("b", 7)
    assert second.version == 3
    assert [table.end(first, Outcome.TRAINED), table.end(second, Outcome.TRAINED)] == [False, True]


def test_a_claim_whose_lease_is_over_ends_nothing_even_where_nobody_took_it_over():
    clock = Clock()
    table = ClaimTable(lease_s=LEASE_S, clock=clock)
    table.add([0])
    claim = table.claim("a", 0)
    clock.now += LEASE_S
    assert not table.end(claim, Outcome.TRAINED)


def test_the_same_owner_cannot_end_a_task_by_the_claim_it_had_before():
    table = ClaimTable()
    table.add([0])
    before = table.claim("a", 0)
    table.release(before)
    assert table.claim("a", 0) is not None
    assert not table.end(before, Outcome.TRAINED)


def test_a_second_host_of_one_file_is_refused(tmp_path):
    table = ClaimTable(tmp_path / "claims.db")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        ClaimTable(tmp_path / "claims.db")
    table.close()


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_a_torn_tail_costs_the_last_changes_and_nothing_before_them(tmp_path, cut):
    table = ClaimTable(tmp_path / "claims.db")
    table.add(list(range(50)))
    for claim in table.fill("a", 50):
        table.end(claim, Outcome.TRAINED)
    torn = tmp_path / "torn"
    torn.mkdir()
    for file in tmp_path.glob("claims.db*"):  # as a machine that loses its power leaves them
        content = file.read_bytes()
        (torn / file.name).write_bytes(content[:-cut] if file.name.endswith("-wal") else content)
    table.close()
    ended = [ClaimTable(torn / "claims.db")]
    states = [ended[0].word(key).state for key in range(50)]
    lost = states.count(State.PENDING)
    assert 1 <= lost <= 3
    assert states == [State.COMMITTED] * (50 - lost) + [State.PENDING] * lost


def test_the_checker_tells_histories_apart():
    won = Call("a", "claim", True, 0, 2)
    assert linearisable([won, Call("b", "claim", False, 1, 3)])
    assert not linearisable([won, Call("b", "claim", True, 1, 3)])
    assert linearisable([won, Call("b", "claim", True, 1, 6), Call("a", "give_back", True, 4, 5)])
    assert not linearisable([won, Call("b", "claim", True, 1, 3), Call("a", "give_back", True, 4, 5)])
    assert not linearisable([won, Call("a", "end", True, 3, 4), Call("a", "claim", True, 5, 6)])


@pytest.mark.parametrize("seed", range(5))
def test_calls_of_threads_at_once_are_linearisable(tmp_path, seed):
    table = ClaimTable(tmp_path / "claims.db")
    keys = list(range(4))
    table.add(keys)
    histories: dict[int, list[Call]] = {key: [] for key in keys}
    start = threading.Barrier(len(OWNERS))

    def recorded(owner, key, what, call):
        began = time.monotonic()
        answer = call()
        histories[key].append(Call(owner, what, answer is not None and answer is not False, began, time.monotonic()))
        return answer

    def work(owner):
        start.wait()
        for key in keys:
            for attempt in range(3):
                claim = recorded(owner, key, "claim", lambda key=key: table.claim(owner, key))
                if claim is None:
                    continue
                if (attempt + seed + key) % 3:
                    recorded(owner, key, "give_back", lambda claim=claim: table.release(claim))
                else:
                    recorded(owner, key, "end", lambda claim=claim: table.end(claim, Outcome.TRAINED))

    threads = [threading.Thread(target=work, args=(owner,)) for owner in OWNERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(history) >= 9 for history in histories.values())
    assert all(linearisable(history) for history in histories.values())
    table.close()
