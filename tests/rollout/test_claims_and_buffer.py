"""Claims and buffer together against a model that is two plain sets: whatever happens, nothing is lost and nothing doubled."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from miles.data.types import Group, Sample
from rollout.buffer import Buffer
from rollout.claim_table import Outcome
from rollout.claims import Claims
from tests.rollout.groups_for_tests import group, prompt


class Run(RuleBasedStateMachine):
    """A driver that claims, generates, fails, filters, trains, publishes versions, and is killed and resumed at any moment."""

    @initialize(max_attempts=st.integers(1, 3), max_staleness=st.integers(0, 2))
    def start(self, max_attempts, max_staleness):
        self.max_attempts, self.max_staleness = max_attempts, max_staleness
        self.claims, self.buffer, self.version = Claims(max_attempts), Buffer(), 0
        self.generating: dict[int, int] = {}  # claim -> version it was started at
        self.buffered: dict[int, int] = {}
        self.tries: dict[int, int] = {}
        self.ended: dict[int, Outcome] = {}
        self.claimed = 0

    @rule()
    def claim(self):
        claim_id = self.claims.claim()
        assert claim_id == self.claimed
        self.claimed += 1
        self.tries[claim_id] = 1
        self.generating[claim_id] = self.version

    @precondition(lambda self: self.generating)
    @rule(data=st.data())
    def finish(self, data):
        claim_id = data.draw(st.sampled_from(sorted(self.generating)))
        started = self.generating.pop(claim_id)
        self.buffer.put(group(claim_id, [self.version, started]))
        self.buffered[claim_id] = started

    @precondition(lambda self: self.generating)
    @rule(data=st.data())
    def fail(self, data):
        claim_id = data.draw(st.sampled_from(sorted(self.generating)))
        del self.generating[claim_id]
        self.retry(claim_id, Outcome.FAILED)

    @precondition(lambda self: self.generating)
    @rule(data=st.data())
    def filter_out(self, data):
        claim_id = data.draw(st.sampled_from(sorted(self.generating)))
        del self.generating[claim_id]
        self.claims.end(claim_id, Outcome.FILTERED)
        self.ended[claim_id] = Outcome.FILTERED

    @rule(n=st.integers(1, 4))
    def train(self, n):
        taken = self.buffer.take(n, self.version, self.max_staleness)
        young = sorted(c for c, started in self.buffered.items() if self.version - started <= self.max_staleness)
        assert [g.claim_id for g in taken] == young[:n]
        refused = [g.claim_id for g in self.buffer.drain_refused()]
        assert sorted(refused) == sorted(set(self.buffered) - set(young))
        for claim_id in young[:n]:
            del self.buffered[claim_id]
            self.claims.end(claim_id, Outcome.TRAINED)
            self.ended[claim_id] = Outcome.TRAINED
        for claim_id in refused:
            del self.buffered[claim_id]
            self.retry(claim_id, Outcome.EXHAUSTED)
        self.version += 1

    @rule()
    def killed_and_resumed(self):
        state = json.loads(json.dumps({"claims": self.claims.state_dict(), "buffer": self.buffer.state_dict()}))
        self.claims, self.buffer = Claims(self.max_attempts), Buffer()
        self.claims.load_state_dict(state["claims"])
        self.buffer.load_state_dict(state["buffer"], prompt)
        # What was being generated is generated again, at the version of the checkpoint.
        assert sorted(set(self.claims.in_flight()) - set(self.buffer.claim_ids())) == sorted(self.generating)
        self.generating = dict.fromkeys(self.generating, self.version)

    def retry(self, claim_id, last):
        again = self.tries[claim_id] < self.max_attempts
        assert self.claims.retry(claim_id, last) == again
        if again:
            self.tries[claim_id] += 1
            self.generating[claim_id] = self.version
        else:
            self.ended[claim_id] = last

    @invariant()
    def every_claim_is_in_exactly_one_place(self):
        if not hasattr(self, "claims"):
            return
        places = [*self.generating, *self.buffered, *self.ended]
        assert sorted(places) == list(range(self.claimed))
        assert self.claims.in_flight() == sorted([*self.generating, *self.buffered])
        assert self.buffer.claim_ids() == sorted(self.buffered)
        assert self.claims.low_water == min([*self.generating, *self.buffered], default=self.claimed)
        assert self.claims.ended == {o: list(self.ended.values()).count(o) for o in Outcome}


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_worked_example_of_the_docstring():
    claims = Claims(max_attempts=2)
    assert [claims.claim(), claims.claim()] == [0, 1]
    assert [claims.retry(0, Outcome.FAILED), claims.retry(0, Outcome.FAILED)] == [True, False]
    claims.end(1, Outcome.TRAINED)
    assert claims.low_water == 2
    assert claims.ended == {Outcome.TRAINED: 1, Outcome.FILTERED: 0, Outcome.FAILED: 1, Outcome.EXHAUSTED: 0}


@pytest.mark.parametrize("claim_id", [0, 5])
def test_an_end_that_comes_twice_or_out_of_nowhere_is_caught(claim_id):
    claims = Claims(max_attempts=1)
    claims.claim()
    claims.end(0, Outcome.TRAINED)
    with pytest.raises(AssertionError, match="not open"):
        claims.end(claim_id, Outcome.TRAINED)


def test_a_group_put_twice_is_caught():
    buffer = Buffer()
    buffer.put(group(0, [0]))
    with pytest.raises(AssertionError, match="already"):
        buffer.put(group(0, [0]))


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_the_bound_is_on_the_oldest_trained_token_and_holds_at_high_versions(max_staleness):
    version = 1_000_000
    buffer = Buffer()
    buffer.put(group(0, [version, version - max_staleness]))
    buffer.put(group(1, [version, version - max_staleness - 1]))
    assert [g.claim_id for g in buffer.take(2, version, max_staleness)] == [0]
    assert [g.claim_id for g in buffer.drain_refused()] == [1]


def test_tokens_that_are_not_trained_do_not_make_a_group_stale():
    buffer = Buffer()
    old = group(0, [5, 0])
    masked = Sample(**{f: getattr(old.samples[1], f) for f in old.samples[1].__dataclass_fields__} | {"loss_mask": [False]})
    buffer.put(Group(claim_id=0, prompt=old.prompt, samples=(old.samples[0], masked)))
    assert [g.claim_id for g in buffer.take(1, 5, 0)] == [0]


def test_refused_groups_are_handed_back_once():
    buffer = Buffer()
    buffer.put(group(0, [0]))
    buffer.take(1, 9, 0)
    assert [g.claim_id for g in buffer.drain_refused()] == [0]
    assert buffer.drain_refused() == []


def test_order_is_by_claim_whatever_the_order_of_arrival():
    buffer = Buffer()
    for claim_id in (4, 1, 3, 0, 2):
        buffer.put(group(claim_id, [0]))
    assert [g.claim_id for g in buffer.take(3, 0, 0)] == [0, 1, 2]
    assert [g.claim_id for g in buffer.take(3, 0, 0)] == [3, 4]


def test_a_group_comes_back_from_a_checkpoint_bit_for_bit():
    buffer = Buffer()
    before = group(3, [2, 1], rewards=[0.1 + 0.2, None])
    buffer.put(before)
    restored = Buffer()
    restored.load_state_dict(json.loads(json.dumps(buffer.state_dict())), prompt)
    (after,) = restored.take(1, 2, 5)
    assert after.prompt.text == before.prompt.text
    for a, b in zip(after.samples, before.samples, strict=True):
        for name in ("tokens", "loss_mask", "logprobs", "weight_versions"):
            assert getattr(a, name).dtype == getattr(b, name).dtype
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes()
        assert (a.sample_id, a.reward, a.status, a.prompt_length, a.metadata) == (b.sample_id, b.reward, b.status, b.prompt_length, b.metadata)
