"""Recovery from a killed data owner, and joining of a new one, against deduplicating and assigning the epoch anew; claims per second.

    python scripts/bench/claims.py
    python scripts/bench/claims.py --prompts 4000 --rounds 5

Owners hold `--prompts` each, half of them shared with the next owner. The baseline is deduplication before training: every owner's prompts are
labelled and every label is claimed, on an empty table; after a change of owners all of it is done again. Deduplicating while training, one
owner dies that holds its whole share (the worst case; a run has a step's worth in flight): the time until every task of it that another owner
has is that one's. One joins: the time until it has a step's prompts (32), where its prompts are in random order and where those that it shares
come first (the worst order), and until all of its own are labelled and claimed, which can be no faster than its part of all labels.
All in one process with the table in a file: wall-clock seconds without the lease, which both ways wait for, and without a network. Exit code 1
where recovery or the first step of who joins, in random order, is less than 10 times as fast.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rollout.claim_table import ClaimTable, Outcome  # noqa: E402
from rollout.dedup import DataOwner, KeyServer  # noqa: E402

OWNERS, STEP, LEASE_S, BOUND = 4, 32, 1e6, 10.0


class Epoch:
    """A table and a key server, and owners by number, as they come."""

    def __init__(self, folder: Path, prompts: int) -> None:
        self.ahead_s = 0.0
        self.prompts, self.server = prompts, KeyServer(bytes(32))
        self.table = ClaimTable(folder / f"{time.monotonic_ns()}.db", lease_s=LEASE_S, clock=lambda: time.monotonic() + self.ahead_s)

    def owner(self, number: int, *, shuffled: bool = True) -> DataOwner:
        first = number * self.prompts // 2
        texts = [f"prompt {i}" for i in range(first, first + self.prompts)]
        if shuffled:
            random.Random(number).shuffle(texts)
        return DataOwner(f"owner {number}", texts, self.server, self.table, self.server.public_key())


def deduplicated(folder: Path, prompts: int, owners: int) -> tuple[float, Epoch, list[DataOwner]]:
    """Every prompt of every owner labelled and claimed, one owner after the other; seconds."""
    epoch = Epoch(folder, prompts)
    everybody = [epoch.owner(number) for number in range(owners)]
    began = time.perf_counter()
    for owner in everybody:
        owner.take(prompts)
    return time.perf_counter() - began, epoch, everybody


def recovery(folder: Path, prompts: int) -> tuple[float, float]:
    """Owner 0 dies: seconds until owner 1 has what both have, and of the baseline, which begins anew without owner 0."""
    baseline, _, _ = deduplicated(folder, prompts, OWNERS - 1)
    _, epoch, everybody = deduplicated(folder, prompts, OWNERS)
    epoch.ahead_s = LEASE_S / 2
    for owner in everybody[1:]:
        owner.heartbeat()
    epoch.ahead_s = LEASE_S + 1  # owner 0's lease alone is over
    began = time.perf_counter()
    taken = everybody[1].take(prompts)
    seconds = time.perf_counter() - began
    assert len(taken) == prompts // 2, f"{len(taken)} tasks were taken over, not the {prompts // 2} that both owners have"
    return seconds, baseline


def joining(folder: Path, prompts: int) -> tuple[float, float, float, float]:
    """An owner joins: seconds until it has a step's prompts, the same in the worst order, until it has all of its own, and of the baseline with it."""
    baseline, _, _ = deduplicated(folder, prompts, OWNERS + 1)
    steps = []
    for shuffled in (False, True):
        _, epoch, _ = deduplicated(folder, prompts, OWNERS)
        began = time.perf_counter()
        new = epoch.owner(OWNERS, shuffled=shuffled)
        first = new.take(STEP)
        steps.append(time.perf_counter() - began)
        assert len(first) == STEP
    new.take(prompts)
    return steps[1], steps[0], time.perf_counter() - began, baseline


def claims_per_second(folder: Path, at_once: int, count: int = 2000) -> float:
    """Tasks claimed `at_once` and ended one by one, each change on disk before it is answered."""
    table = ClaimTable(folder / f"{time.monotonic_ns()}.db")
    table.add(list(range(count)))
    began = time.perf_counter()
    while claims := table.fill("worker", at_once):
        for claim in claims:
            table.end(claim, Outcome.TRAINED)
    return count / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000, help="of each owner")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recoveries = [recovery(folder, options.prompts) for _ in range(options.rounds)]
        joins = [joining(folder, options.prompts) for _ in range(options.rounds)]
        rates = {at_once: claims_per_second(folder, at_once) for at_once in (1, 64)}
    took, anew = (statistics.median(column) for column in zip(*recoveries, strict=True))
    first, worst, whole, with_it = (statistics.median(column) for column in zip(*joins, strict=True))
    print(f"{OWNERS} owners x {options.prompts} prompts, medians of {options.rounds}")
    rows = {"recovery": (took, anew), "join, a step": (first, with_it), "the same, worst order": (worst, with_it), "join, whole": (whole, with_it)}
    for row, (seconds, baseline) in rows.items():
        print(f"{row:22} {seconds:7.3f} s   anew {baseline:7.3f} s   {baseline / seconds:6.1f} times as fast")
    for at_once, rate in rates.items():
        print(f"claimed {at_once:3d} at once and ended, on disk: {rate:8.0f} a second")
    return 0 if min(anew / took, with_it / first) >= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
