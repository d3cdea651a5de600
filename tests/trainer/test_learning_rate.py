"""Learning rates, against hand-computed values."""

from __future__ import annotations

import pytest

from trainer.config import OptimizerConfig
from trainer.rows.schedule import learning_rate


@pytest.mark.parametrize(
    ("schedule", "warmup", "ratio", "expected"),
    [
        ("constant", 0, 0.0, [1, 1, 1, 1]),
        ("constant", 2, 0.0, [0.5, 1, 1, 1]),
        ("linear", 0, 0.0, [0.75, 0.5, 0.25, 0]),
        ("linear", 2, 0.5, [0.5, 1, 0.75, 0.5]),
        ("cosine", 0, 0.0, [0.8535533905932737, 0.5, 0.14644660940672627, 0]),
        ("cosine", 1, 0.2, [1, 0.8, 0.4, 0.2]),
    ],
)
def test_rates(schedule: str, warmup: int, ratio: float, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_steps=warmup, min_lr_ratio=ratio)  # type: ignore[arg-type]
    assert [learning_rate(config, step, 4) for step in range(4)] == pytest.approx(expected, abs=1e-12)


def test_steps_beyond_the_plan_keep_the_last_rate() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear", min_lr_ratio=0.1)
    assert learning_rate(config, 50, 4) == pytest.approx(0.1)
