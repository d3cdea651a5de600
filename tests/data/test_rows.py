import json

import pyarrow
import pyarrow.parquet
import pytest

from miles.config import ConfigError
from miles.data.rows import read


def write(path, *lines: str | bytes):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + b"\n")
    return str(path)


def numbered(path, count: int) -> str:
    return write(path, *[json.dumps({"n": i}) for i in range(count)])


def test_invalid_json_is_named_by_file_line_and_column(tmp_path):
    path = write(tmp_path / "train.jsonl", *['{"prompt": "a"}'] * 16, '{"prompt": "a",, }')
    with pytest.raises(ConfigError, match=r"train\.jsonl:17: invalid JSON at column 16"):
        read([path])


def test_lines_are_counted_over_blank_ones_and_blank_ones_are_reported(tmp_path):
    path = write(tmp_path / "train.jsonl", '{"n": 1}', "", "  ", '{"n": 2}')
    table = read([path])
    assert [row["n"] for row in table.rows] == [1, 2]
    assert table.places[1].endswith("train.jsonl:4")
    assert table.blank_lines == 2


def test_the_last_newline_is_no_blank_line(tmp_path):
    assert read([numbered(tmp_path / "a.jsonl", 3)]).blank_lines == 0


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    path = write(tmp_path / "latin.jsonl", '{"p": "a"}', b'{"p": "caf\xe9"}')
    with pytest.raises(ConfigError, match=r"latin\.jsonl:2: not UTF-8 at byte 11 of the line \(0xe9\)"):
        read([path])


def test_non_ascii_text_and_unusual_line_separators_are_kept(tmp_path):
    text = "größe 数学 🙂 \u2028 end"
    path = write(tmp_path / "u.jsonl", json.dumps({"p": text}, ensure_ascii=False))
    assert read([path]).rows == [{"p": text}]


def test_half_a_surrogate_pair_is_refused_by_place_and_a_whole_one_is_read(tmp_path):
    assert read([write(tmp_path / "ok.jsonl", r'{"p": "\ud83d\ude42"}')]).rows == [{"p": "🙂"}]
    with pytest.raises(ConfigError, match=r"bad\.jsonl:2: \\ud83d is half of a surrogate pair"):
        read([write(tmp_path / "bad.jsonl", '{"p": "a"}', r'{"p": "x \ud83d y"}')])


def test_windows_line_ends_and_a_byte_order_mark_are_read(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n{"n": 2}\r\n')
    assert [row["n"] for row in read([str(path)]).rows] == [1, 2]


def test_a_line_that_is_no_object_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"n": 1}', '["n", 2]')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: each line must be one JSON object, but this is a list"):
        read([path])


def test_a_missing_column_is_named_with_the_nearest_and_the_count(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"prompt": "x"}', '{"promt": "y"}', '{"promt": "z"}')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2 has no column 'prompt' .*did you mean 'promt'\?; 2 of 3 rows lack it"):
        read([path]).column("prompt", "data.prompt_column")


def test_mixed_kinds_are_refused_with_place_and_counts(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"p": "x"}', '{"p": "y"}', '{"p": ["z"]}')
    table = read([path])
    with pytest.raises(ConfigError, match=r"column 'p' is a list at .*a\.jsonl:3, but a string at .*a\.jsonl:1 \(2 x string, 1 x list\)"):
        table.one_kind("p", table.column("p", "option"))


@pytest.mark.parametrize(
    ("cut", "expected"),
    [("[0:3]", [0, 1, 2]), ("[7:]", [7, 8, 9]), ("[:2]", [0, 1]), ("[-2:]", [8, 9]), ("[:]", list(range(10))), ("[8:100]", [8, 9])],
)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_slices_are_pythons(tmp_path, cut, expected, ending):
    path = str(tmp_path / f"a.{ending}")
    if ending == "jsonl":
        numbered(tmp_path / "a.jsonl", 10)
    else:
        pyarrow.parquet.write_table(pyarrow.table({"n": list(range(10))}), path)
    assert [row["n"] for row in read([f"{path}@{cut}"]).rows] == expected


@pytest.mark.parametrize("cut", ["@[5]", "@[1:2:3]", "@[a:b]", "@[1:2"])
def test_a_malformed_slice_is_refused(tmp_path, cut):
    with pytest.raises(ConfigError, match="slice must be"):
        read([numbered(tmp_path / "a.jsonl", 3) + cut])


def test_a_slice_that_selects_nothing_is_refused_with_the_number_of_rows(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.jsonl@\[5:\]' selects no rows: the file has 3"):
        read([numbered(tmp_path / "a.jsonl", 3) + "@[5:]"])


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(ConfigError, match="selects no rows: the file has 0"):
        read([str(tmp_path / "a.jsonl")])


def test_a_file_that_does_not_exist_is_refused_with_the_nearest_name(tmp_path):
    numbered(tmp_path / "train.jsonl", 1)
    with pytest.raises(ConfigError, match=r"does not exist; did you mean 'train\.jsonl'\?"):
        read([str(tmp_path / "trian.jsonl")])


def test_an_unknown_file_type_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"a \.jsonl or \.parquet file is needed, not '\.csv'"):
        read([str(tmp_path / "a.csv")])


def test_a_broken_parquet_file_is_refused_by_name(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"a\.parquet: not a parquet file"):
        read([str(tmp_path / "a.parquet")])


def test_files_follow_one_another_and_parquet_rows_know_their_place(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"n": [10, 11, 12]}), tmp_path / "b.parquet")
    table = read([numbered(tmp_path / "a.jsonl", 2), str(tmp_path / "b.parquet") + "@[1:]"])
    assert [row["n"] for row in table.rows] == [0, 1, 11, 12]
    assert table.places[2].endswith("b.parquet row 2")


def test_no_paths_at_all_is_refused():
    with pytest.raises(ConfigError, match="paths is empty"):
        read([])
