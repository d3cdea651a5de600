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
def work(table: object, owner: str, log: Path) -> None:
    """Works until all has ended. Writes its process first, then each task that the table says ended by it."""
    with log.open("w", buffering=1) as file:
        print(os.getpid(), file=file)
        while True:
            claims = ray.get(table.fill.remote(owner, 3))
            if not claims and ray.get(table.counts.remote()) == {"trained": TASKS}:
                return
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


@pytest.mark.usefixtures("ray_cluster")
def test_every_task_ends_once_whoever_is_killed_stopped_or_late(tmp_path):
    table = host_table(tmp_path / "claims.db", lease_s=LEASE_S, kind=Host)
    ray.get(table.add.remote(list(range(TASKS))))
    logs = {owner: tmp_path / owner for owner in ("killed", "stopped", "steady", "late")}
    running = {owner: work.remote(table, owner, logs[owner]) for owner in ("killed", "stopped", "steady")}
    until(lambda: all(len(read(logs[owner])) > 3 for owner in running))
    stopped = int(read(logs["stopped"])[0])
    os.kill(int(read(logs["killed"])[0]), signal.SIGKILL)
    os.kill(stopped, signal.SIGSTOP)
    try:
        os.kill(ray.get(table.pid.remote()), signal.SIGKILL)
        running["late"] = work.remote(table, "late", logs["late"])
        # Of the two that fall silent the tasks are taken over, so that all end without them.
        ray.get([running["steady"], running["late"]], timeout=60)
    finally:
        os.kill(stopped, signal.SIGCONT)
    ray.get(running["stopped"], timeout=30)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(running["killed"])
    said = Counter(int(line) for log in logs.values() for line in read(log)[1:] if line.isdigit())
    words = {key: ray.get(table.word.remote(key)) for key in range(TASKS)}
    assert {(word.state, word.outcome) for word in words.values()} == {(State.COMMITTED, Outcome.TRAINED)}
    assert max(said.values()) == 1
    # Only the killed worker may have ended a task without the time to write it down.
    assert {words[key].owner for key in words if key not in said} <= {"killed"}
    for owner, log in logs.items():
        assert all(words[int(key)].owner == owner for key in read(log)[1:] if key.isdigit())
    ray.kill(table)
