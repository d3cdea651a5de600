"""What every test shares: the environment that must stand before torch is imported, the costly things made once a session, who runs
beside whom, and the seconds that each folder took."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from miles.core.environment import set_defaults  # noqa: E402

set_defaults(threads=1)
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that needs the network is wrong
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.pop("RAY_ADDRESS", None)  # a run would join that cluster
# Ray workers and engine processes import this checkout.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

if TYPE_CHECKING:
    from rollout.engines.sglang_engine import SGLangEngine
    from tests.trainer_pool import Pool

# What `scripts/test` runs in one of its two processes because it shares something costly, the longest first; any other file is a group of
# its own. All that names SGLang shares servers.
RAY = {
    "tests/run/test_cluster.py",
    "tests/run/test_distill.py",
    "tests/run/test_megatron.py",
    "tests/run/test_distill_engines.py",
    "tests/rollout/test_claim_workers.py",
    "tests/rollout/test_dedup_owners.py",
    "tests/rollout/test_teacher_engines.py",
    "tests/run/test_pairs.py",
    "tests/run/test_prefix_overlap.py",
    "tests/run/test_rl.py",
    "tests/run/test_tenants.py",
    "tests/trainer/test_hanging_rank.py",
    "tests/trainer/test_trainer_actor.py",
}
FORKS = {  # of one server that has torch imported, see tests/forks.py
    "tests/conformance/test_trainers.py",
    "tests/conformance/test_trainers_experts.py",
    "tests/conformance/test_trainers_layouts.py",
    "tests/conformance/test_trainers_megatron.py",
    "tests/conformance/test_weight_sync.py",
    "tests/conformance/test_weight_sync_faults.py",
    "tests/conformance/test_weight_sync_lora.py",
    "tests/conformance/test_weight_sync_views.py",
    "tests/core/checkpoint/test_checkpoint_writer.py",
    "tests/core/model/test_packed_fsdp.py",
    "tests/trainer/fsdp/test_compiled.py",
    "tests/trainer/megatron/test_convert.py",
    "tests/trainer/split_forward/test_hilore_ranks.py",
    "tests/trainer/split_forward/test_sharing_ranks.py",
    "tests/trainer/test_parts_of_a_row.py",
    "tests/trainer/test_penalty_and_guard.py",
    "tests/trainer/test_trainer_distill.py",
    "tests/trainer/test_trainer_lora.py",
    "tests/trainer/test_trainer_lora_experts.py",
    "tests/trainer/test_trainer_taught.py",
    "tests/trainer/test_trainer_tenants.py",
    "tests/trainer/test_trainer_pairs.py",
}
ORDER = ("ray", "sglang", "forks")


def group_of(nodeid: str) -> str:
    file = nodeid.partition("::")[0]
    if file in RAY:
        return "ray"
    if "sglang" in nodeid:
        return "sglang"
    return "forks" if file in FORKS else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    costly = {"ray_cluster": "ray", "sglang_engine": "sglang", "two_ranks": "forks", "four_ranks": "forks"}
    for item in items:
        used = {group for fixture, group in costly.items() if fixture in getattr(item, "fixturenames", ())}
        used |= {"sglang"} if item.get_closest_marker("sglang") else set()
        if used - {group_of(item.nodeid)}:
            raise pytest.UsageError(f"{item.nodeid} would start what the group {min(used)!r} has already: tests/conftest.py says who belongs to it")
    items.sort(key=lambda item: ORDER.index(group) if (group := group_of(item.nodeid)) in ORDER else len(ORDER))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's own groups (`--dist loadgroup`) read a field of test items that pytest 9.2 no longer has."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds by folder, set-up and end included. Two processes work side by side, so the sum is more than the clock shows."""
    seconds: dict[str, float] = defaultdict(float)
    for report in (r for reports in terminalreporter.stats.values() for r in reports if isinstance(r, pytest.TestReport)):
        parts = report.nodeid.partition("::")[0].split("/")
        seconds["/".join(parts[: min(len(parts) - 1, 2)])] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds by folder")
        for folder, spent in sorted(seconds.items(), key=lambda entry: -entry[1]):
            terminalreporter.line(f"{spent:7.1f}  {folder}")


TINY_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 +-=.,:?"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a random Qwen3 of 0.15M parameters, context 256. Read-only: every test shares it."""
    from miles.core.model.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", alphabet=TINY_ALPHABET, context=256)


@pytest.fixture(scope="session")
def sglang_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """The session's one SGLang server, on `tiny_model`. A start costs 15-40 s, so share it: leave it generating, at any version."""
    from miles.core.model.config import ModelConfig
    from rollout.config import RolloutConfig
    from rollout.engines.sglang_engine import SGLangEngine
    from tests.sglang_servers import started

    yield from started(
        SGLangEngine(
            ModelConfig(path=str(tiny_model)), RolloutConfig(engine="sglang", max_running=32, timeout_s=60), log_folder=tmp_path_factory.mktemp("sglang")
        )
    )


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """This process is the one rank of a module that says `usefixtures("one_rank")`."""
    from tests.trainer_cases import single_rank

    yield from single_rank()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Pool]:
    """Two processes joined by gloo that run functions of test modules in step; transformers' norm may be in float64 there."""
    yield from _ranks(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Pool]:
    yield from _ranks(4)


def _ranks(world: int) -> Iterator[Pool]:
    from tests.trainer_pool import Pool

    pool = Pool(world)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for the session: 8 logical CPUs, a small object store, no dashboard."""
    import ray

    # "local": whatever other cluster this machine may have, it is not for tests.
    ray.init("local", num_cpus=8, object_store_memory=150 * 1024 * 1024, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
