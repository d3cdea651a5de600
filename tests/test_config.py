"""Recipes and overrides: what is accepted, what is refused, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from miles.config import ConfigError, Section, describe, load, nearest


class Engine(Section):
    threads: int = Field(1, ge=1, description="threads")
    name: str | None = Field("plain", description="a name")


class Part(Section):
    weight: float = 1.0


class Job(Section):
    title: str
    lr: float = 0.1
    parts: list[Part] = Field(default_factory=list)
    tags: list[str] = Field(default_factory=list)
    engine: Engine = Engine()


def recipe(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_origins_say_file_line_command_line_or_default(tmp_path: Path) -> None:
    path = recipe(tmp_path, 'title = "a"\n\n[engine]\nthreads = 2\n')
    leaves = {key: (value, origin) for key, value, origin in load(Job, path, ["lr=0.5"]).leaves()}
    assert leaves == {
        "title": ("a", "job.toml:1"),
        "lr": (0.5, "command line"),
        "parts": ([], "default"),
        "tags": ([], "default"),
        "engine.threads": (2, "job.toml:4"),
        "engine.name": ("plain", "default"),
    }


def test_the_later_override_wins(tmp_path: Path) -> None:
    assert load(Job, recipe(tmp_path, 'title = "a"'), ["lr=1", "lr=2"]).config.lr == 2.0


@pytest.mark.parametrize(("raw", "value"), [("x", "x"), ('"3"', "3"), ("runs/a-b", "runs/a-b")])
def test_an_override_that_is_no_toml_is_a_string(raw: str, value: str) -> None:
    assert load(Job, None, [f"title={raw}"]).config.title == value


def test_null_stands_for_none_in_both_places(tmp_path: Path) -> None:
    assert load(Job, recipe(tmp_path, 'title = "a"\n[engine]\nname = "null"\n')).config.engine.name is None
    assert load(Job, None, ["title=a", "engine.name=null"]).config.engine.name is None


def test_an_unknown_key_names_the_nearest_valid_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'engine.thread' \(job.toml:3\); did you mean 'engine.threads'\?"):
        load(Job, recipe(tmp_path, 'title = "a"\n[engine]\nthread = 2\n'))


def test_an_unknown_key_in_an_item_of_a_list_does_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'parts.1.wieght' \(job.toml:5\); did you mean 'parts.1.weight'\?"):
        load(Job, recipe(tmp_path, 'title = "a"\n[[parts]]\nweight = 2.0\n[[parts]]\nwieght = 2.0\n'))


def test_a_wrong_value_is_quoted_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"engine.threads = 0 \(command line\): .*greater than or equal to 1"):
        load(Job, None, ["title=a", "engine.threads=0"])


@pytest.mark.parametrize("value", ["true", '"2"', "2.0"])
def test_a_value_of_another_type_is_refused_and_not_converted(value: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.threads = .* \(command line\): Input should be a valid integer"):
        load(Job, None, ["title=a", f"engine.threads={value}"])


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_a_number_that_is_not_finite_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"lr = {value}"):
        load(Job, None, ["title=a", f"lr={value}"])


def test_one_value_in_place_of_a_list_or_a_section_says_what_is_needed() -> None:
    with pytest.raises(
        ConfigError, match=r"tags = 'x' \(command line\): Input should be a list, for example \[\"a\", \"b\"\]\nengine = 5 .*section with options"
    ):
        load(Job, None, ["title=a", "tags=x", "engine=5"])


def test_a_byte_order_mark_is_read_over_and_other_encodings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b'\xef\xbb\xbftitle = "\xc3\xa9"\n')
    assert load(Job, path).config.title == "é"
    path.write_bytes(b'title = "\xe9"\n')
    with pytest.raises(ConfigError, match=r"job\.toml: not UTF-8 at byte 10 \(0xe9\)"):
        load(Job, path)


def test_a_missing_value_says_how_to_give_it() -> None:
    with pytest.raises(ConfigError, match="option 'title' is missing: add it to the recipe or pass title=VALUE"):
        load(Job, None)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load(Job, None, ["lrr=1", "engine.threads=x"])
    assert len(str(error.value).splitlines()) == 3


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the recipe '.*nowhere.toml'"):
        load(Job, tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(Job, recipe(tmp_path, "title = "))


def test_an_override_reaches_an_item_of_a_list(tmp_path: Path) -> None:
    path = recipe(tmp_path, 'title = "a"\n[[parts]]\n[[parts]]\nweight = 2.0\n')
    resolved = load(Job, path, ["parts.1.weight=2.5", "parts.1.weight=3"])
    assert [part.weight for part in resolved.config.parts] == [1.0, 3.0]
    assert {key: origin for key, _, origin in resolved.leaves()}["parts"] == "job.toml:2, command line"
    for key, message in (("parts.2.weight", "'parts' is a list of 2"), ("title.x", "'title' is a value, not a section")):
        with pytest.raises(ConfigError, match=message):
            load(Job, path, [f"{key}=3"])


def test_an_override_without_a_value_shows_the_form() -> None:
    with pytest.raises(ConfigError, match="'lr' is not of the form key=value"):
        load(Job, None, ["lr"])


def test_describe_walks_sections_and_marks_what_is_required() -> None:
    options = {key: default for key, _, default, _ in describe(Job)}
    assert options["title"] == "(required)"
    assert options["engine.threads"] == 1


def test_nearest_lists_what_is_valid_when_nothing_is_close() -> None:
    assert nearest("zzz", ["b", "a"]) == "; valid: a, b"


def test_a_configuration_cannot_be_changed() -> None:
    job = load(Job, None, ["title=a"]).config
    with pytest.raises(ValueError, match="frozen"):
        job.lr = 3.0
