"""A run over two Ray nodes that differs from the plain one in all else too: one step off, two ranks, two engines, broadcast and a reference."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.run.runs import records


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("nodes")
    done = subprocess.run([sys.executable, "-m", "tests.run.on_two_nodes", str(folder)], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return records(folder / "run")


def test_every_version_is_published_and_none_older_than_one_is_trained(steps: list[dict[str, Any]]) -> None:
    assert [r["version/trained"] for r in steps] == [1, 2, 3]
    assert max(r["staleness/max"] for r in steps) <= 1


def test_engines_are_a_batch_ahead_when_a_batch_is_complete(steps: list[dict[str, Any]]) -> None:
    assert all(r["queue/in_flight"] + r["queue/buffered"] >= 4 for r in steps)


def test_the_divergence_from_the_reference_begins_at_zero_and_is_measured(steps: list[dict[str, Any]]) -> None:
    assert abs(steps[0]["policy/kl"]) < 1e-6 < steps[-1]["policy/kl"]


def test_without_exact_operators_engine_and_trainer_differ(steps: list[dict[str, Any]]) -> None:
    """In the first step, whose tokens are of the very weights that score them."""
    assert steps[0]["staleness/max"] == 0
    assert steps[0]["mismatch/logprob_abs_max"] > 0.0
