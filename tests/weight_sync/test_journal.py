"""The journal survives what a crash leaves behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weight_sync.contracts import WeightSyncError
from weight_sync.journal import Entry, Journal


def written(path: Path, *versions: int) -> Path:
    journal = Journal(path)
    for version in versions:
        journal.append(Entry(version=version, kind="publish", engines=(0, 1)))
    journal.close()
    return path


def test_a_new_journal_has_no_last_entry(tmp_path: Path) -> None:
    assert Journal(tmp_path / "new" / "weights.jsonl").last is None


def test_the_last_entry_is_found_again(tmp_path: Path) -> None:
    entry = Entry(version=7, kind="publish", fingerprint="ab", bytes=12, tensors=3, engines=(0, 4))
    journal = Journal(tmp_path / "j")
    journal.append(entry)
    journal.close()
    assert Journal(tmp_path / "j").last == entry


def test_an_entry_is_one_line_of_json(tmp_path: Path) -> None:
    lines = written(tmp_path / "j", 1, 2).read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == [1, 2]


def test_a_line_torn_at_any_byte_never_counted(tmp_path: Path) -> None:
    content = written(tmp_path / "j", 1, 2).read_bytes()
    first = content.index(b"\n") + 1
    for length in range(first, len(content)):
        (tmp_path / "j").write_bytes(content[:length])
        last = Journal(tmp_path / "j").last
        assert last is not None
        assert last.version == 1


def test_after_a_torn_line_the_journal_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path / "j", 1, 2)
    path.write_bytes(path.read_bytes()[:-5])
    written(path, 3)
    assert [json.loads(line)["version"] for line in path.read_text().splitlines()] == [1, 3]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "j", 1, 2, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b'"version"', b'"verzion"') + lines[2])
    with pytest.raises(WeightSyncError, match=r"j:2 is not an entry"):
        Journal(path)


FULL_DISK = """
import resource, sys
from pathlib import Path
from weight_sync.contracts import WeightSyncError
from weight_sync.journal import Entry, Journal
journal = Journal(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (Path(sys.argv[1]).stat().st_size + 20,) * 2)
try:
    journal.append(Entry(version=2, kind="publish"))
except WeightSyncError as error:
    print(error)
"""


def test_an_entry_that_does_not_fit_the_disk_is_an_error_and_not_in_the_journal(tmp_path: Path) -> None:
    path = written(tmp_path / "j", 1)
    before = path.read_bytes()
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, timeout=60, check=True)
    assert "cannot write version 2" in done.stdout
    assert path.read_bytes() == before
