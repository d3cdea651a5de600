"""The claim table on its host, with workers in processes of their own that join late, are killed and are stopped past their lease."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import ray

from rollout.claim_table import ClaimTable, Outcome, State, host_table

TASKS = 60
LEASE_S = 1.0


class Host(ClaimTable):
    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0, max_retries=0)
def work(table: object, owner: str, log: Path, at_three: signal.Signals | None) -> None:
    """Works until all has ended. Writes its process first, then each task that the table says ended by it. `at_three`: what it sends itself
    with three claims in hand."""
    with log.open("w", buffering=1) as file:
        print(os.getpid(), file=file)
        while True:
            claims = ray.get(table.fill.remote(owner, 3))
            if not claims and ray.get(table.counts.remote()) == {"trained": TASKS}:
                return
            if at_three is not None and len(claims) == 3:
                os.kill(os.getpid(), at_three)
                at_three = None
            for claim in claims:
                time.sleep(0.01)
                if ray.get(table.end.remote(claim, Outcome.TRAINED)):
                    print(claim.key, file=file)
                else:
                    print("refused", file=file)


def read(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def until(what) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def stopped_now(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.usefixtures("ray_cluster")
def test_every_task_ends_once_whoever_is_killed_stopped_or_late(tmp_path):
    table = host_table(tmp_path / "claims.db", lease_s=LEASE_S, kind=Host)
    ray.get(table.add.remote(list(range(TASKS))))
    logs = {owner: tmp_path / owner for owner in ("killed", "stopped", "steady", "late")}
    signals = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "steady": None}
    running = {owner: work.remote(table, owner, logs[owner], sent) for owner, sent in signals.items()}
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(running["killed"], timeout=30)
    until(lambda: read(logs["stopped"]) and stopped_now(int(read(logs["stopped"])[0])))
    os.kill(ray.get(table.pid.remote()), signal.SIGKILL)
    running["late"] = work.remote(table, "late", logs["late"], None)
    try:
        # The six tasks that two of them hold are taken over, so that all end without them.
        ray.get([running["steady"], running["late"]], timeout=60)
    finally:
        os.kill(int(read(logs["stopped"])[0]), signal.SIGCONT)
    ray.get(running["stopped"], timeout=30)
    assert read(logs["stopped"])[1:] == ["refused"] * 3
    said = Counter(int(line) for log in logs.values() for line in read(log)[1:] if line.isdigit())
    words = {key: ray.get(table.word.remote(key)) for key in range(TASKS)}
    assert {(word.state, word.outcome) for word in words.values()} == {(State.COMMITTED, Outcome.TRAINED)}
    assert max(said.values()) == 1
    assert sorted(said) == list(range(TASKS))
    for owner, log in logs.items():
        assert all(words[int(key)].owner == owner for key in read(log)[1:] if key.isdigit())
    ray.kill(table)
