"""What most tests of the trainer share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer_cases import small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of two small layers."""
    return small_model(tmp_path_factory.mktemp("small"))
