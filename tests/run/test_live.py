"""What a terminal and a log file see of a run."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

from miles.run.live import Live

IN_A_TERMINAL = """
from miles.run.live import Live
with Live("rl", 3) as live:
    for version in (1, 2, 3):
        live.update(version, {"reward/mean": version / 4, "seconds/step": 1.5, "seconds/train": 0.5})
"""


def test_a_log_file_gets_the_first_and_the_last_step_as_plain_lines():
    stream = io.StringIO()
    with Live("rl", 50, stream) as live:
        for version in range(1, 51):
            live.update(version, {"reward/mean": version / 100, "seconds/step": 1.5, "seconds/train": 0.5})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "rl 1/50  reward 0.01  1.50 s (train 0.50)"
    assert lines[-1] == "rl 50/50  reward 0.5  1.50 s (train 0.50)"
    assert len(lines) < 10


def test_a_value_stays_until_a_newer_one_comes():
    stream = io.StringIO()
    with Live("rl", 2, stream) as live:
        live.update(0, {"eval/greedy": 0.25})
        live.update(2, {"reward/mean": 1.0})
    assert "reward 1  eval greedy 0.25" in stream.getvalue().splitlines()[-1]


def test_a_reader_that_goes_away_does_not_end_the_run(caplog):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, Live("rl", 3, stream) as live:
        for version in (1, 2, 3):
            live.update(version, {"reward/mean": 0.5})
    assert caplog.messages == ["nothing is shown from here on (Broken pipe); the run goes on, and its folder has every record"]


def test_a_terminal_gets_a_bar_that_ends_full():
    reader, writer = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", IN_A_TERMINAL], stdout=writer, stderr=writer, env={**os.environ, "TERM": "xterm", "COLUMNS": "100"})
    os.close(writer)
    chunks = []
    try:
        while chunk := os.read(reader, 65536):
            chunks.append(chunk)
    except OSError:
        pass  # Linux ends a closed pseudo-terminal with an error instead of an empty read
    finally:
        os.close(reader)
        assert process.wait(timeout=30) == 0
    shown = b"".join(chunks).decode()
    assert "3/3" in shown
    assert "0.75" in shown
