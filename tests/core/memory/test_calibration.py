"""Risk is a line through 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from miles.core.memory import profile
from miles.core.memory.calibration import Calibration, Trial, calibrate
from miles.core.memory.profile import Profile, key_of


def test_the_slope_is_that_of_least_squares_through_zero() -> None:
    """x = 1, 2 and y = 1, 5: 11 / 5. The mean loss is 3/4."""
    found = calibrate([[Trial(exposure=2.0, loss=0.5, error=1.0), Trial(exposure=2.0, loss=1.0, error=5.0)]])
    assert found.risk(0, 4.0) == pytest.approx(11 / 5 * 0.75 * 4)


def test_a_layer_of_which_nothing_is_known_is_never_worth_the_risk() -> None:
    found = calibrate([[], [Trial(exposure=0.0, loss=0.5, error=0.0)]])
    assert found.per_exposure(0) == found.per_exposure(1) == float("inf")


def test_a_calibration_survives_its_checkpoint() -> None:
    found = calibrate([[Trial(exposure=2.0, loss=0.5, error=1.0)], []])
    assert Calibration.of_state(json.loads(json.dumps(found.state()))) == found


def test_a_profile_is_found_again_under_its_own_key_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_CACHE", str(tmp_path))
    cpu, stored = torch.device("cpu"), Profile(recompute=(1e-6, 2e-6), compress=(3e-7, 4e-7))
    key = key_of({"hidden_size": 64}, torch.float32, cpu, 1)
    profile.store(key, stored)
    assert profile.load(key) == stored
    others = [
        key_of({"hidden_size": 65}, torch.float32, cpu, 1),
        key_of({"hidden_size": 64}, torch.bfloat16, cpu, 1),
        key_of({"hidden_size": 64}, torch.float32, cpu, 2),
    ]
    assert [profile.load(other) for other in others] == [None] * 3


def test_a_cache_that_cannot_be_read_or_written_costs_a_measurement_and_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stored = Profile(recompute=(1e-6,), compress=(3e-7,))
    monkeypatch.setenv("MILES_CACHE", str(tmp_path))
    profile.store("k", stored)
    for broken in ("", "{}", '{"recompute": null, "compress": [1]}', '{"recompute": ["a"], "compress": [1]}'):
        (profile.folder() / "k.json").write_text(broken)
        assert profile.load("k") is None
    assert caplog.text.count("cannot be read, and is measured anew") == 4
    (tmp_path / "file").touch()
    monkeypatch.setenv("MILES_CACHE", str(tmp_path / "file"))
    profile.store("k", stored)
    assert profile.load("k") is None
    assert "is not kept" in caplog.text
