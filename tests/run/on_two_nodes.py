"""A training run on a Ray cluster of two nodes (two raylets on this machine), in a process of its own: Ray is initialised once a process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from miles.core.environment import set_defaults

set_defaults()

import ray  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from miles.run import rl  # noqa: E402
from tests.run.runs import make_task, rl_recipe  # noqa: E402


def main(folder: Path) -> None:
    """Two CPUs a node for two ranks and two engines, so that one engine at least is not on rank 0's. Joined as `ray job submit` has it."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=2, object_store_memory=100 * 2**20)
        os.environ["RAY_ADDRESS"] = nodes.address
        overrides = ("run.steps=3", "run.max_staleness=1", "trainer.ranks=2", "rollout.engines=2", "weight_sync.transport=broadcast", "algorithm.kl_coef=0.05")
        rl.run(rl_recipe(make_task(folder), folder / "run", *overrides))
        actors = {node["NodeID"] for node in ray.nodes()} if ray.is_initialized() else set()
        print(f"nodes still joined: {len(actors)}")
    finally:
        nodes.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
