"""A row's loss computed in parts: the parts cover it, sequences stay whole where they must, and no cut changes a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from algorithms import registry
from tests.trainer_cases import gradients, make_backend, mixed_groups, relative_difference, restore_norm, small_model
from tests.trainer_pool import Pool
from trainer.fsdp.scoring import _parts

EVERY: list[dict[str, Any]] = [
    *({"loss": name, "entropy_coef": 0.1} for name in registry.loss_names()),
    {"loss": "gspo", "aggregation": "sequence_mean", "kl_coef": 0.1},
    {"loss": "ppo_clip", "old_logprobs": "recompute", "correction": "truncate", "correction_level": "token"},
    {"loss": "ppo_clip", "old_logprobs": "recompute", "correction": "clip", "correction_level": "geometric", "sequence_mask": 0.5},
    {"loss": "ppo_clip", "old_logprobs": "recompute", "correction": "mask", "correction_level": "sequence"},
    *({"loss": "ppo_clip", "entropy_guard": guard, "guard_share": 0.3} for guard in ("clip_cov", "kl_cov")),
]

# One of tokens, one of sequences, one with everything that a sequence decides.
IN_THE_GATE = [a for a in EVERY if (a["loss"] == "gspo" and "kl_coef" not in a) or a.get("sequence_mask") or a == {"loss": "ppo_clip", "entropy_coef": 0.1}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module", autouse=True)
def norms() -> Iterator[None]:
    yield
    restore_norm()


def step(rank: int, world: int, path: Path, chunk: int, row: int, algorithm: dict[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    backend = make_backend(path, rank=rank, world=world, algorithm=algorithm, trainer={"logprob_chunk": chunk, "max_tokens_per_microbatch": row})
    metrics = backend.step_rl(mixed_groups()).metrics
    return gradients(backend), metrics


def test_whole_sequences_are_grouped_up_to_the_chunk() -> None:
    assert _parts([3, 5, 4, 20, 0], 10, 1, False) == {(0, 8): slice(0, 2), (8, 12): slice(2, 3), (12, 32): slice(3, 4), (32, 32): slice(4, 5)}


def test_pairs_stay_together() -> None:
    assert _parts([3, 5, 4, 2, 7], 10, 2, False) == {(0, 8): slice(0, 2), (8, 14): slice(2, 4), (14, 21): slice(4, 5)}


def test_tokens_are_cut_evenly_wherever_that_is() -> None:
    assert _parts([3, 0, 5, 4], 5, 1, True) == {(0, 4): slice(0, 3), (4, 8): slice(2, 3), (8, 12): slice(3, 4)}
    assert _parts([0], 5, 1, True) == {(0, 0): slice(0, 1)}


@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(a, marks=() if a in IN_THE_GATE else pytest.mark.full, id="-".join(str(value) for value in a.values())) for a in EVERY],
)
def test_no_chunk_split_or_rank_changes_a_gradient_or_a_metric(model: Path, two_ranks: Pool, algorithm: dict[str, Any]) -> None:
    """Every registered objective: all in one forward, against chunks of one and of five tokens, rows of one sequence or two, and two ranks."""
    expected, expected_metrics = step(0, 1, model, 1024, 8192, algorithm)
    runs = [step(0, 1, model, 1, 30, algorithm), step(0, 1, model, 5, 8192, algorithm), two_ranks.run(step, model, 4, 30, algorithm)[0]]
    for found, metrics in runs:
        assert relative_difference(found, expected) < 1e-12
        assert metrics == pytest.approx(expected_metrics, rel=1e-9)
