"""`miles doctor` on this machine, and on ones that lack something."""

from __future__ import annotations

import pytest

from miles.run import doctor


def findings() -> dict[str, doctor.Finding]:
    return {finding.item: finding for finding in doctor.examine()}


def test_the_test_machine_is_ready(capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert doctor.run() == 0
    assert capsys.readouterr().out.rstrip().endswith("ready")


@pytest.mark.parametrize(
    "item", ["python", "torch", "ray", "devices", "OMP_WAIT_POLICY", "ports", "/dev/shm", "disk", "memory", "ray cluster", "sglang", "wandb"]
)
def test_every_item_is_examined(item):
    assert item in findings()


def test_spinning_threads_are_advised_against(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "export OMP_WAIT_POLICY=PASSIVE" in findings()["OMP_WAIT_POLICY"].text


def test_too_little_shared_memory_is_essential(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "NEED_SHM", 1 << 60)
    assert doctor.run() == 1
    assert "MiB free of at least 1099511627776" in capsys.readouterr().out
