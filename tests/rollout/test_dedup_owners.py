"""Three data owners in processes of their own, one of them killed while it trains: each distinct prompt is trained once all the same."""

import os
import secrets
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import ray

from rollout.claim_table import Remote, host_table
from rollout.dedup import DataOwner, KeyServer

PROMPTS = {
    "ann": [f"prompt {i}" for i in range(0, 20)],
    "bob": [f"prompt {i}" for i in range(10, 30)],
    "cat": [f"prompt {i}" for i in range(5, 30)],
}


@ray.remote(num_cpus=0, max_retries=0)
def own(name: str, server: object, table: object, public_key: bytes, log: Path, forever: bool) -> None:
    """Trains what it wins, two at a time, and writes down what was trained. `forever`: takes a first batch and hangs."""
    owner = DataOwner(name, PROMPTS[name], Remote(server), Remote(table), public_key)
    while not owner.done:
        batch = owner.take(2)
        log.with_suffix(".pid").write_text(f"{os.getpid()}")
        while forever:
            time.sleep(0.1)
        time.sleep(0.02)
        with log.open("a") as file:
            for won in batch:
                if owner.trained(won):
                    print(PROMPTS[name][won.row], file=file)


@pytest.mark.usefixtures("ray_cluster")
def test_what_a_killed_owner_had_won_is_trained_by_another(tmp_path):
    server = ray.remote(KeyServer).options(num_cpus=0).remote(secrets.token_bytes(32))
    table = host_table(tmp_path / "claims.db", lease_s=1.0)
    public_key = ray.get(server.public_key.remote())
    dead = tmp_path / "cat.pid"
    cat = own.remote("cat", server, table, public_key, tmp_path / "cat", True)
    deadline = time.monotonic() + 30
    while not (dead.exists() and dead.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert ray.get(table.counts.remote()) == {"pending": 2}
    os.kill(int(dead.read_text()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(cat)
    ray.get([own.remote(name, server, table, public_key, tmp_path / name, False) for name in ("ann", "bob")], timeout=60)
    trained = Counter(line for name in ("ann", "bob") for line in (tmp_path / name).read_text().splitlines())
    assert trained == Counter(f"prompt {i}" for i in range(30))
    ray.kill(server)
    ray.kill(table)
