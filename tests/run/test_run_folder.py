"""A run has its folder for itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles.config import ConfigError
from miles.run import engines, folder
from miles.run.recipe import RunConfig

HOLD = (
    "import sys\nfrom miles.run.folder import held\nfrom miles.run.recipe import RunConfig\nwith held(RunConfig(folder=sys.argv[1])):\n    print()\n    input()"
)


def test_a_second_run_in_the_folder_is_refused_until_the_first_is_gone_however_it_ends(tmp_path: Path) -> None:
    run = RunConfig(folder=str(tmp_path / "läufe" / "1"))
    first = subprocess.Popen([sys.executable, "-c", HOLD, run.folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdout is not None
    try:
        first.stdout.readline()
        with pytest.raises(ConfigError, match="another run is at work in it"), folder.held(run):
            pass
    finally:
        first.kill()
        first.wait()
    with folder.held(run) as path:
        assert path.is_dir()


def test_a_folder_that_was_only_held_still_counts_as_empty(tmp_path: Path) -> None:
    run = RunConfig(folder=str(tmp_path / "run"))
    with folder.held(run):
        pass
    folder.check(run, resume=False)
    with pytest.raises(ConfigError, match="holds no run to go on with"):
        folder.check(run, resume=True)


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="which is a file"):
        folder.check(RunConfig(folder=str(tmp_path / "file" / "run")), resume=False)


def test_a_folder_that_the_system_will_not_make_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"run\.folder = '/proc/run' cannot be written: No such file or directory"),
        folder.held(RunConfig(folder="/proc/run")),
    ):
        pass


def test_engines_are_asked_for_of_a_run_that_is_at_work_alone(tmp_path: Path) -> None:
    run = RunConfig(folder=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="no run is at work in"):
        engines.ask(tmp_path / "run", 2)
    with folder.held(run):
        with pytest.raises(ConfigError, match="0 engines cannot answer anything"):
            engines.ask(tmp_path / "run", 0)
        engines.ask(tmp_path / "run", 2)
        assert (tmp_path / "run" / engines.WANTED).read_text() == "2\n"
    with pytest.raises(ConfigError, match="no run is at work in"):
        engines.ask(tmp_path / "run", 2)
