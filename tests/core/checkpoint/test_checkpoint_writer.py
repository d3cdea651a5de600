"""Checkpoints of one process: whole or not at all, with a full disk and with kill -9 in the middle of a save."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from miles.core.checkpoint import reader, rng
from miles.core.checkpoint.store import CheckpointError, CheckpointStore
from miles.core.checkpoint.writer import CheckpointWriter
from tests.forks import CONTEXT


def _save(store: CheckpointStore, step: int, tensors: dict[str, torch.Tensor], *, keep: int | None = None, asynchronous: bool = False) -> CheckpointWriter:
    writer = CheckpointWriter(0, 1)
    writer.save(store.begin(step), tensors, {"step": step}, {"cursor": step}, keep=keep, asynchronous=asynchronous)
    return writer


def _load(folder: Path, tensors: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    return reader.load(folder, tensors, rank=0, world=1, seed=0)


def test_bits_and_state_come_back(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(7, 3), "b": torch.tensor(3.0), "c": torch.randn(4).bfloat16(), "nan": torch.tensor([float("nan"), -0.0])}
    _save(CheckpointStore(tmp_path), 3, tensors)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert _load(tmp_path / "step_00000003", found) == ({"step": 3}, {"cursor": 3})
    assert all(found[n].numpy(force=True).tobytes() == t.numpy(force=True).tobytes() for n, t in tensors.items() if n != "c")
    assert torch.equal(found["c"].view(torch.int16), tensors["c"].view(torch.int16))


def test_training_that_goes_on_does_not_reach_the_checkpoint(tmp_path: Path) -> None:
    tensor = torch.arange(200_000.0)
    writer = _save(CheckpointStore(tmp_path), 1, {"a": tensor}, asynchronous=True)
    tensor.fill_(-1)
    writer.wait()
    found = torch.zeros(200_000)
    _load(tmp_path / "step_00000001", {"a": found})
    assert torch.equal(found, torch.arange(200_000.0))


def test_the_random_generators_go_on_where_they_were(tmp_path: Path) -> None:
    rng.seed_all(5, 0)
    np.random.standard_normal()  # leaves half a pair in NumPy's cache
    _save(CheckpointStore(tmp_path), 1, {"a": torch.zeros(1)})
    expected = [random.gauss(0, 1), np.random.standard_normal(), float(torch.randn(()))]
    _load(tmp_path / "step_00000001", {"a": torch.zeros(1)})
    assert [random.gauss(0, 1), np.random.standard_normal(), float(torch.randn(()))] == expected


def test_older_checkpoints_go_only_when_the_new_one_is_complete(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        _save(store, step, {"a": torch.zeros(1)}, keep=2)
    assert store.complete_steps() == [3, 4]


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    _save(CheckpointStore(tmp_path), 1, {"a": torch.zeros(1)})
    with pytest.raises(ValueError, match="exists already"):
        _save(CheckpointStore(tmp_path), 1, {"a": torch.ones(1)})


def test_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        CheckpointWriter(0, 1).save(tmp_path / "step_00000001", {}, {}, {"what": object()}, keep=None, asynchronous=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("here", "message"),
    [
        ({"a": torch.zeros(2)}, "'b'.*no such tensor"),
        ({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}, "'c'.*lacks it"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, r"'b' is torch.float32\[2\] there, torch.float32\[3\] here"),
        ({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.bfloat16)}, "'b' is torch.float32.*torch.bfloat16"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path: Path, here: dict[str, torch.Tensor], message: str) -> None:
    _save(CheckpointStore(tmp_path), 1, {"a": torch.zeros(2), "b": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=message):
        _load(tmp_path / "step_00000001", here)


def _script(body: str, *args: str) -> subprocess.Popen:
    code = "import sys\nfrom pathlib import Path\nimport torch\nfrom miles.core.checkpoint.store import *\nfrom miles.core.checkpoint.writer import *\n" + body
    return subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


_FULL_DISK = """
import resource, signal
root = Path(sys.argv[1])
writer = CheckpointWriter(0, 1)
writer.save(root / "step_00000001", {"a": torch.ones(1000)}, {}, {}, keep=1, asynchronous=True)
writer.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
writer.save(root / "step_00000002", {"a": torch.ones(1_000_000)}, {}, {}, keep=1, asynchronous=True)
try:
    writer.wait()
except CheckpointError as error:
    print(error)
"""


def test_a_full_disk_is_an_error_and_the_previous_checkpoint_is_intact(tmp_path: Path) -> None:
    """The limit on file size gives the same kind of error from `write` as a full disk does."""
    process = _script(_FULL_DISK, str(tmp_path))
    output, problems = process.communicate(timeout=90)
    assert process.returncode == 0, problems
    assert "step_00000002 could not be written" in output
    assert "File too large" in output
    assert "step 1 and is intact" in output
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    found = torch.zeros(1000)
    _load(tmp_path / "step_00000001", {"a": found})
    assert torch.equal(found, torch.ones(1000))


def _save_for_ever(root: Path, started: Connection) -> None:
    writer = CheckpointWriter(0, 1)
    for step in range(1, 10_000):
        writer.save(CheckpointStore(root).begin(step), {"a": torch.full((500_000,), float(step))}, {"step": step}, {}, keep=2, asynchronous=True)
        started.send(step)


@pytest.mark.parametrize("kills", [2, pytest.param(60, marks=pytest.mark.full)])
def test_kill_9_in_the_middle_of_a_save_leaves_the_one_before(tmp_path: Path, kills: int) -> None:
    random_delay = random.Random(0)
    for attempt in range(kills):
        root = tmp_path / str(attempt)
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_save_for_ever, args=(root, theirs))
        process.start()
        theirs.close()
        try:
            for _ in range(3):
                ours.recv()
            time.sleep(random_delay.uniform(0, 0.02))
        finally:
            process.kill()
            process.join()
        store = CheckpointStore(root)
        latest, step = store.latest(), store.latest_step()
        assert latest is not None
        assert step is not None
        found = torch.zeros(500_000)
        assert _load(latest, {"a": found})[0] == {"step": step}
        assert torch.equal(found, torch.full((500_000,), float(step)))
        _save(store, 20_000, {"a": found})
        assert not list(root.glob("*.partial"))
