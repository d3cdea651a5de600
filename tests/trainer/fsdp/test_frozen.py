"""Frozen parameters stay bit for bit, the others learn as they would have, and a pattern that means nothing is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.trainer_cases import gradients, make_backend, mixed_groups, plain_gradients, relative_difference, small_model, weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("frozen"))


@pytest.mark.parametrize("patterns", [["model.embed_tokens.*", "model.layers.0.*"], ["*norm*", "*.k_proj.weight"], ["model.layers.1.*"]])
def test_what_is_frozen_stays_and_the_rest_has_its_own_gradient(model: Path, patterns: list[str]) -> None:
    backend = make_backend(model, trainer={"frozen": patterns, "weight_decay": 0.1})
    before = weights(backend)
    backend.step_rl(mixed_groups())
    found, expected, after = gradients(backend), plain_gradients(model, mixed_groups()), weights(backend)
    trained = {name for name, p in backend.model.named_parameters() if p.requires_grad}
    assert 0 < len(trained) < len(expected)
    assert found.keys() == trained
    assert relative_difference(found, {name: expected[name] for name in trained}) < 1e-12
    assert {name for name in before if not np.array_equal(before[name], after[name])} == trained


def test_a_pattern_without_a_parameter_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.frozen has 'layers.7.\*', which matches no parameter; the first are model.embed_tokens.weight"):
        make_backend(model, trainer={"frozen": ["layers.7.*"]})


def test_freezing_everything_is_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="leaves nothing to train"):
        make_backend(model, trainer={"frozen": ["*"]})
