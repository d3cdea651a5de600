from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.run.runs import records


def test_a_run_over_two_ray_nodes_publishes_every_version(tmp_path: Path) -> None:
    """Trainer and engine on different nodes; each step's tokens come from the version that the last step published."""
    done = subprocess.run([sys.executable, "-m", "tests.run.on_two_nodes", str(tmp_path)], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = records(tmp_path / "run")
    assert [r["version/trained"] for r in steps] == [1, 2]
    assert max(r["staleness/max"] for r in steps) == 0
