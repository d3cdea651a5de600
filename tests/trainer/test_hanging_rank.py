"""A rank that hangs: real ranks on gloo, in Ray's workers, of which one never comes to a collective."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from trainer.actor import TrainerError, results_of_ranks
from trainer.rendezvous import open_store


@ray.remote(max_retries=0)
def rank_of_two(meeting: Any, rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from trainer.rendezvous import join

    (folder / str(rank)).touch()
    wait_for(folder / str(1 - rank))  # whoever still imports torch does not hang
    join(meeting, None, rank=rank, world=2, address="127.0.0.1", gpu=False, timeout_s=4.0)
    if rank == 1:
        wait_for(folder / "ended")
    dist.all_reduce(torch.ones(1))


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)


@pytest.mark.usefixtures("ray_cluster")
def test_a_rank_that_hangs_is_named_when_the_others_have_waited_for_it(tmp_path: Path) -> None:
    store, meeting = open_store("127.0.0.1", 2, 60.0)

    async def call() -> None:
        await results_of_ranks([rank_of_two.remote(meeting, rank, tmp_path) for rank in range(2)])

    try:
        with pytest.raises(TrainerError, match=r"trainer rank 1 of 2 hangs: rank 0 waited for trainer\.timeout_s in vain"):
            asyncio.run(call())
    finally:
        (tmp_path / "ended").touch()
        del store
