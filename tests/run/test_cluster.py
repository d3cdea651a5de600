"""A run that asks a Ray cluster for more than it has is refused with the arithmetic, and does not wait. The session's cluster has 8 CPUs and no GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from miles.config import ConfigError
from miles.run import cluster as cluster_module
from miles.run.cluster import cluster
from miles.run.demands import Demand
from miles.run.recipe import ClusterConfig

pytestmark = pytest.mark.usefixtures("ray_cluster")


def refused(*demands: Demand) -> str:
    with pytest.raises(ConfigError) as caught, cluster(ClusterConfig(), list(demands), one_node=False):
        pass
    return str(caught.value)


def test_more_cpus_than_the_cluster_has() -> None:
    message = refused(*[Demand("trainer rank", 2, 0)] * 4, Demand("engine", 1, 0))
    assert "4 trainer ranks x 2 + 1 engine x 1 = 9 CPUs, but the Ray cluster has 8" in message


def test_gpus_that_the_cluster_has_not() -> None:
    message = refused(*[Demand("trainer rank", 1, 0.5)] * 2)
    assert "2 trainer ranks x 0.5 = 1 GPUs, but the Ray cluster has 0" in message


def test_what_another_job_holds_is_waited_for_a_while_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = placement_group([{"CPU": 7}])
    try:
        assert other.wait(30)
        with monkeypatch.context() as patched:
            patched.setattr(cluster_module, "PLACEMENT_TIMEOUT_S", 0.5)
            assert "could not place 1 engine x 2 within" in refused(Demand("engine", 2, 0))
    finally:
        remove_placement_group(other)
    with cluster(ClusterConfig(), [Demand("engine", 2, 0)], one_node=False) as places:
        assert len(places.of("engine")) == 1
    assert ray.is_initialized()


TERMINATED = """
import time
from miles.run.signals import unwind_when_terminated
unwind_when_terminated()
from miles.run.cluster import ClusterConfig, cluster
from miles.run.demands import Demand
try:
    with cluster(ClusterConfig(cpus=1), [Demand("engine", 1, 0)], one_node=True):
        print("up", flush=True)
        time.sleep(60)
finally:
    print("ended", flush=True)
"""


@pytest.mark.full
def test_a_run_that_is_terminated_unwinds_though_ray_has_handlers_of_its_own() -> None:
    process = subprocess.Popen([sys.executable, "-c", TERMINATED], stdout=subprocess.PIPE, text=True, env=os.environ | {"RAY_ADDRESS": ""})
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "ended\n"
    assert process.returncode == 143
