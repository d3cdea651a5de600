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
    """One CPU a node, so that the trainer rank and the engine cannot be on the same one. Joined as `ray job submit` has it."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False})
    try:
        nodes.add_node(num_cpus=1, object_store_memory=100 * 2**20)
        os.environ["RAY_ADDRESS"] = nodes.address
        rl.run(rl_recipe(make_task(folder), folder / "run", "weight_sync.transport=broadcast", "run.steps=2"))
        actors = {node["NodeID"] for node in ray.nodes()} if ray.is_initialized() else set()
        print(f"nodes still joined: {len(actors)}")
    finally:
        nodes.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
