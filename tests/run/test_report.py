"""`miles report`: one page that needs no other file, and text that stays text."""

from __future__ import annotations

import re
import struct
from html.parser import HTMLParser
from pathlib import Path

import pytest

from miles.config import ConfigError
from miles.run.report import page
from miles.tracking.config import TrackingConfig
from miles.tracking.tracker import Tracker

HOSTILE = "<script>alert('x')</script><img src=x onerror=alert(1)>&amp;"


class Parsed(HTMLParser):
    """Tags, attributes and the text of every table cell, as a browser would see them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.cells: list[str] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self._in_cell = tag in ("td", "th")
        if self._in_cell:
            self.cells.append("")

    def handle_endtag(self, tag):
        self._in_cell = False

    def handle_data(self, data):
        if self._in_cell:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a & <b>"
    with Tracker(TrackingConfig(), folder, {"model": {"path": HOSTILE}, "tracking": {"api_key": "hunter2"}}, None) as tracker:
        for step in range(1, 5):
            tracker.log(step, {"reward/mean": step / 4, "policy/entropy": 1 / step, "policy/kl": float("nan")})
            tracker.table(step, "samples", ["prompt", HOSTILE], [[HOSTILE, step]])
    page.write(folder)
    return folder


@pytest.fixture(scope="module")
def parsed(run: Path) -> Parsed:
    return Parsed((run / "report.html").read_text(encoding="utf-8"))


def test_html_in_a_sample_stays_text(parsed):
    assert HOSTILE in parsed.cells
    assert not parsed.tags & {"script", "img"}


def test_the_page_needs_no_other_file(parsed):
    assert [link for link in parsed.links if not link.startswith("#")] == []


def test_the_curves_are_in_the_page(run):
    text = (run / "report.html").read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    assert "reward of the trained batch" in re.sub(r"<[^>]*>", "", text)


def test_configuration_and_samples_are_in_the_page_without_secrets(parsed):
    assert parsed.cells[parsed.cells.index("model.path") + 1] == HOSTILE
    assert parsed.cells[parsed.cells.index("tracking.api_key") + 1] == "[redacted]"


def test_the_picture_is_a_png_of_some_size(run):
    data = (run / "curves.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(width, height) > 200


def test_a_run_without_records_is_refused(tmp_path):
    Tracker(TrackingConfig(), tmp_path, {}, None).close()
    with pytest.raises(ValueError, match="no metric has been recorded yet"):
        page.write(tmp_path)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"it has no metrics\.jsonl"):
        page.write(tmp_path)
