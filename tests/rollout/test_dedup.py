"""Owners who deduplicate while they train: every distinct prompt is trained once, and nobody sees another's."""

import hashlib

import pytest

from rollout.claim_table import ClaimTable
from rollout.dedup import DataOwner, KeyServer, labels

SEED = bytes(range(32))


class Recording(KeyServer):
    def __init__(self, seed):
        super().__init__(seed)
        self.seen: list[bytes] = []

    def evaluate(self, blinded):
        self.seen += blinded
        return super().evaluate(blinded)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_equal_prompts_have_equal_labels_for_every_owner_and_other_keys_give_others():
    one, again, other = KeyServer(SEED), KeyServer(SEED), KeyServer(bytes(32))
    first = labels(["a", "b", "a"], one, one.public_key())
    assert first[0] == first[2] != first[1]
    assert labels(["a"], again, again.public_key()) == first[:1]
    assert labels(["a"], other, other.public_key()) != first[:1]


def test_the_key_server_sees_new_points_each_time_and_a_label_is_no_hash_of_the_prompt():
    server = Recording(SEED)
    (label,) = labels(["a"], server, server.public_key())
    labels(["a"], server, server.public_key())
    assert len({*server.seen}) == 2
    hashes = {hashlib.new(name, b"a").hexdigest() for name in ("sha256", "blake2s", "sha3_256")}
    assert label not in hashes | {hashlib.sha256(hashlib.sha256(b"a").digest()).hexdigest()}
    assert all(hashlib.sha256(b"a").digest() not in (point, point[::-1]) for point in server.seen)


def test_an_answer_by_another_key_is_refused():
    with pytest.raises(BaseException, match="ProofVerification"):
        labels(["a"], KeyServer(bytes(32)), KeyServer(SEED).public_key())


def test_a_seed_of_another_length_is_refused():
    with pytest.raises(ValueError, match="5 bytes"):
        KeyServer(b"short")


def test_a_silent_owners_prompts_go_to_those_who_have_them_and_its_late_ends_are_refused():
    clock, server = Clock(), KeyServer(SEED)
    table = ClaimTable(lease_s=10, clock=clock)
    ann, bob = (DataOwner(name, prompts, server, table, server.public_key()) for name, prompts in (("ann", ["x", "y"]), ("bob", ["y", "z", "z", "x"])))
    anns = ann.take(2)
    assert [won.row for won in anns] == [0, 1]
    (z,) = bob.take(4)
    assert z.row == 1
    assert ann.trained(anns[0])
    assert bob.take(4) == []
    assert not bob.done
    clock.now += 10
    (y,) = bob.take(4)
    assert y.row == 0
    assert not ann.trained(anns[1])
    assert bob.trained(y)
    assert bob.done
    assert ann.take(2) == []
    assert ann.done


class Failing:
    """A server or a table whose calls of one kind fail now and then, before or after they are carried out."""

    def __init__(self, behind, method, *, after):
        self._behind, self._method, self._after, self.calls = behind, method, after, 0

    def __getattr__(self, name):
        whole = getattr(self._behind, name)
        if name != self._method:
            return whole

        def failing(*args):
            self.calls += 1
            if self.calls % 2 == 0:
                return whole(*args)
            if self._after:
                whole(*args)
            raise ConnectionError(name)

        return failing


@pytest.mark.parametrize("after", [False, True], ids=["not carried out", "answer lost"])
@pytest.mark.parametrize("method", ["evaluate", "add", "claim_among"])
def test_a_call_that_fails_loses_no_prompt(method, after):
    """Another owner has `b` at first, so that some are taken by a second call within one `take`."""
    server, clock = KeyServer(SEED), Clock()
    table = ClaimTable(lease_s=1000, clock=clock)
    other = DataOwner("bob", ["b"], server, table, server.public_key())
    (b,) = other.take(1)
    failing = Failing(server if method == "evaluate" else table, method, after=after)
    ann = DataOwner("ann", ["a", "b", "c", "d", "a"], *((failing, table) if method == "evaluate" else (server, failing)), server.public_key())
    trained = []
    for round_number in range(20):
        if round_number == 10:
            table.leave("bob")
        try:
            won = ann.take(3)
        except ConnectionError:
            continue
        trained += [one.row for one in won if ann.trained(one)]
    assert sorted(trained) == [0, 1, 2, 3]
    assert ann.done
    assert failing.calls > 2
    assert not other.trained(b)
