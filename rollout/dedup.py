"""Deduplication of prompts across data owners who show them to nobody, while they train (DwT-FL).

A prompt's label is an oblivious pseudorandom function of it (RFC 9497, ristretto255, verifiable mode): the owner blinds the prompt, the key
server evaluates blinded points and learns nothing of them, the owner unblinds and checks the proof. Equal prompts have equal labels; without
the server's key a label cannot be guessed from a prompt. Labels are the tasks of a claim table: who wins one trains its prompt, for all others
it is a duplicate, kept aside, and tried again should the winner fall silent. Nobody waits for all labels: each batch is labelled as it is taken.

The key server and the table's host must not be one party's who also holds prompts: with the key, labels of guessed prompts can be computed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from rollout.claim_table import Claim, Outcome

_INFO = b"miles prompt labels, 1"
_LARGEST_BATCH = 2**16 - 1


class KeyServer:
    """Holds the key of the labels.

    Args:
        seed: 32 secret bytes; the same seed gives the same labels, after a restart too.
    """

    def __init__(self, seed: bytes) -> None:
        from voprf import ristretto

        if len(seed) != 32:
            raise ValueError(f"the key server's seed has {len(seed)} bytes and must have 32: use secrets.token_bytes(32)")
        self._evaluator = ristretto.Evaluator.from_seed(seed, _INFO)

    def public_key(self) -> bytes:
        return self._evaluator.public_key.serialize()

    def evaluate(self, blinded: Sequence[bytes]) -> bytes:
        """Blinded points, 32 bytes each, evaluated and with one proof for all of them."""
        from voprf import ristretto

        return self._evaluator.evaluate_batch([ristretto.BlindedInput.deserialize(point) for point in blinded]).serialize()


def labels(prompts: Sequence[str], server: Any, public_key: bytes) -> list[str]:
    """Labels of the prompts' exact text, 64 hex digits each, by a `KeyServer` or a `Remote` of one.

    An answer whose proof is not of `public_key` ends the process that asked (the library panics with ProofVerification).
    """
    from voprf import ristretto

    if not prompts:
        return []
    assert len(prompts) <= _LARGEST_BATCH
    # Hashed first, since the function takes at most 64 KiB.
    blinded = [ristretto.Client.blind(hashlib.sha256(prompt.encode()).digest()) for prompt in prompts]
    answer = ristretto.VerifiableBatchOutput.deserialize(server.evaluate([point.serialize() for _, point in blinded]))
    outputs = ristretto.Client.finalize_batch([client for client, _ in blinded], answer, ristretto.PublicKey.deserialize(public_key))
    return [hashlib.sha256(output).hexdigest() for output in outputs]


class Won(NamedTuple):
    """A prompt of the owner's to be trained, by its row, and the claim to end when it was."""

    row: int
    claim: Claim


class DataOwner:
    """One owner's prompts, in the one process that trains them.

    Args:
        server, table: a `KeyServer` and a `ClaimTable`, or a `Remote` of each.
        public_key: of the key server, by a way other than the server's answers.

    Example, in each owner's process:

        owner = DataOwner("ann", prompts, Remote(server), Remote(table), public_key)
        while not owner.done:
            for won in owner.take(8):  # fewer, or none, while all else is at work elsewhere: ask again later
                gradient = gradient_of(prompts[won.row])
                if owner.trained(won):  # else another's by now
                    apply(gradient)
    """

    def __init__(self, name: str, prompts: Sequence[str], server: Any, table: Any, public_key: bytes) -> None:
        self._name, self._prompts, self._server, self._table, self._public_key = name, prompts, server, table, public_key
        self._unlabelled = deque(range(len(prompts)))
        self._index: dict[str, int] = {}
        self._open: dict[str, None] = {}  # neither taken nor ended, so another's at present; in order

    def take(self, n: int) -> list[Won]:
        """At most `n` prompts to train now: new ones first, then those that others gave up. Fewer where all else is others' or has ended.

        What the server or the table raises may be answered by another call: nothing is lost on the way.
        """
        won: list[Won] = []
        while len(won) < n and self._unlabelled:
            won += self._claim(self._label(n - len(won)), n)
        if len(won) < n:
            ours = {one.claim.key for one in won}
            won += self._claim([key for key in self._open if key not in ours], n - len(won))
        for one in won:
            del self._open[str(one.claim.key)]
        return won

    def trained(self, won: Won) -> bool:
        """Whether the prompt counts as trained by this owner. False: the claim was lost to a lease that ran out, and the update must leave it out."""
        ended: bool = self._table.end(won.claim, Outcome.TRAINED)
        if not ended:
            self._open[str(won.claim.key)] = None
        return ended

    def heartbeat(self) -> None:
        """Due well within the table's lease while a batch is trained."""
        self._table.heartbeat(self._name)

    @property
    def done(self) -> bool:
        """Nothing is left to take: every prompt was this owner's in `take`, or was ended by another."""
        return not self._unlabelled and not self._open

    def _label(self, n: int) -> list[str]:
        """Labels of the next `n` prompts, registered; those that this owner has had before are left out."""
        rows = list(islice(self._unlabelled, n))
        new: dict[str, int] = {}
        for row, label in zip(rows, labels([self._prompts[row] for row in rows], self._server, self._public_key), strict=True):
            if label not in self._index:
                new.setdefault(label, row)
        self._table.add(list(new))
        for _ in rows:
            self._unlabelled.popleft()
        self._index |= new
        self._open |= dict.fromkeys(new)
        return list(new)

    def _claim(self, keys: list[str], n: int) -> list[Won]:
        if not keys:
            return []
        claims, ended = self._table.claim_among(self._name, keys, n)
        for key in ended:
            del self._open[key]
        return [Won(self._index[str(claim.key)], claim) for claim in claims]
