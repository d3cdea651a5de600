"""Sample weights inside a whole SFT step, against a batch in which samples stand as often as they weigh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer_cases import gradients, make_backend, make_sample, relative_difference

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("max_tokens", [1, 8192])
def test_a_weight_of_n_has_the_gradient_of_n_copies(model: Path, max_tokens: int) -> None:
    samples = [make_sample(0, i, 3, length) for i, length in enumerate((4, 9, 1))]
    weighted = [replace(s, metadata={"weight": w}) for s, w in zip(samples[:2], (6.0, 2.0), strict=True)] + [replace(samples[2], metadata={"weight": 4.0})]
    copies = [samples[i] for i in (0, 0, 0, 1, 2, 2)]
    a = make_backend(model, trainer={"max_tokens_per_microbatch": max_tokens})
    b = make_backend(model)
    mine, theirs = a.step_sft(weighted).metrics, b.step_sft(copies).metrics
    assert relative_difference(gradients(a), gradients(b)) < 1e-10
    assert mine["loss/total"] == pytest.approx(theirs["loss/total"], rel=1e-10)


def test_samples_without_a_weight_weigh_1_beside_others(model: Path) -> None:
    samples = [make_sample(0, i, 3, length) for i, length in enumerate((4, 9))]
    a, b = make_backend(model), make_backend(model)
    a.step_sft([samples[0], replace(samples[1], metadata={"weight": 2.0})])
    b.step_sft([samples[0], samples[1], samples[1]])
    assert relative_difference(gradients(a), gradients(b)) < 1e-10
