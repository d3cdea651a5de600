from pathlib import Path

import pytest

from miles.core.checkpoint.whole import whole


def fill_the_disk(folder: Path) -> None:
    with whole(folder) as partial:
        (partial / "b").write_text("b")
        raise OSError("disk full")


def test_a_folder_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "model"
    for name in ("a", "b"):
        with whole(folder) as partial:
            (partial / name).write_text(name)
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["new", "new/model", "new/model/b"]


def test_what_fails_half_way_leaves_what_was_there_and_is_gone_with_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with whole(folder) as partial:
        (partial / "a").write_text("a")
    with pytest.raises(OSError, match="disk full"):
        fill_the_disk(folder)
    assert [path.name for path in folder.iterdir()] == ["a"]
    with whole(folder) as partial:
        assert list(partial.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
