"""Ray for one run: start or join a cluster, check that the run fits before anything waits, place it, and leave nothing behind."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles.config import ConfigError
from miles.core.environment import worker_environment
from miles.run import signals
from miles.run.demands import Demand, Kind, sum_text, total
from miles.run.machine import ray_address
from miles.run.recipe import ClusterConfig

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Places:
    """Where each actor goes: one bundle of the placement group per demand, in the order of the demands."""

    group: PlacementGroup
    demands: tuple[Demand, ...]

    def of(self, role: str) -> list[PlacementGroupSchedulingStrategy]:
        return [
            PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=index)
            for index, demand in enumerate(self.demands)
            if demand.role == role
        ]

    def node(self, role: str) -> str:
        """Ray's id of the node that the role's first actor is on."""
        index = next(i for i, demand in enumerate(self.demands) if demand.role == role)
        return str(placement_group_table(self.group)["bundles_to_node_id"][index])

    def address(self, role: str) -> str:
        """Network address of the node that the role's first actor is on; loopback while there is only one node."""
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        return "127.0.0.1" if len(nodes) == 1 else nodes[self.node(role)]


@contextmanager
def cluster(config: ClusterConfig, demands: list[Demand], *, one_node: bool) -> Iterator[Places]:
    """Ray with a place for every demand. A cluster that was already joined by this process is used and left as it is.

    Args:
        one_node: every actor must be on one machine (the `tensor` and `views` transports share memory).
    Raises:
        ConfigError: the cluster is smaller than the demands; the message has the arithmetic.
    """
    started = not ray.is_initialized()
    if started:
        connect(config)
        signals.insist()
    try:
        _check_fits(demands, one_node)
        group = placement_group([d.bundle for d in demands], strategy="STRICT_PACK" if one_node else "PACK")
        try:
            if not group.wait(PLACEMENT_TIMEOUT_S):
                raise ConfigError(
                    f"Ray could not place {sum_text(demands)} within {PLACEMENT_TIMEOUT_S:.0f} s; free now: {_free_text()}. "
                    "Another job may hold the rest: wait for it, or ask for less"
                )
            yield Places(group, tuple(demands))
        finally:
            remove_placement_group(group)
    finally:
        if started:
            ray.shutdown()


def connect(config: ClusterConfig) -> None:
    """Join the cluster at `cluster.address` or RAY_ADDRESS, or start one here. Runs made afterwards by this process use it and leave it."""
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # it warns that its token check is on, which is what we want
    address = ray_address(config.address)
    if address is not None:
        if config.address is None:
            logger.warning("joining the Ray cluster at RAY_ADDRESS = %r; cluster.address=local starts one for this run", address)
        try:
            ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError) as error:
            source = "RAY_ADDRESS" if config.address is None else "cluster.address"
            raise ConfigError(f"{source} = {address!r}: no Ray cluster answers there ({error}); start one with `ray start --head`") from error
        return
    ray.init(
        address="local",
        num_cpus=config.cpus or max(2, os.cpu_count() or 1),
        object_store_memory=config.object_store_mb * 2**20,
        include_dashboard=False,
        log_to_driver=True,
        logging_level=logging.WARNING,
        runtime_env={"env_vars": worker_environment(threads=1)},
    )


def _check_fits(demands: list[Demand], one_node: bool) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kinds: tuple[Kind, ...] = ("CPU", "GPU")
    for kind in kinds:
        need = total(demands, kind)
        have = max((n.get(kind, 0) for n in nodes), default=0) if one_node else sum(n.get(kind, 0) for n in nodes)
        if need > have:
            where = "its largest node" if one_node and len(nodes) > 1 else "the Ray cluster"
            why = " (weight_sync.transport = 'tensor' and 'views' keep all on one machine; 'broadcast' may spread)" if one_node and len(nodes) > 1 else ""
            cure = "; cluster.cpus raises what a cluster started here may share out" if kind == "CPU" else ""
            raise ConfigError(
                f"the run needs {sum_text(demands, kind)} = {need:g} {kind}s, but {where} has {have:g}{why}. Fewer or thinner actors ask for less{cure}"
            )
        for demand in demands:
            if demand.of(kind) > max((n.get(kind, 0) for n in nodes), default=0):
                raise ConfigError(f"one {demand.role} needs {demand.of(kind):g} {kind}s, but the largest node has {max(n.get(kind, 0) for n in nodes):g}")


def _free_text() -> str:
    free = ray.available_resources()
    return ", ".join(f"{free.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
