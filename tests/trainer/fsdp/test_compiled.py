"""`trainer.compile`: gradients and log-probs are those of plain transformers, on one graph for all layers and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from tests.lora_cases import LORA, peft_gradients, stir
from tests.trainer_cases import gradients, make_backend, mixed_groups, plain_gradients, relative_difference, small_model
from tests.trainer_pool import Pool
from trainer.config import TrainerConfig
from trainer.fsdp import compiled

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("compiled"))


def compiled_gradients(rank: int, world: int, path: Path, trainer: dict[str, Any], backend: str, lora: dict[str, Any] | None = None) -> dict[str, NDArray[Any]]:
    """Of the first optimizer step, by a backend of torch.compile; `aot_eager` traces as the real one and makes no code."""
    kept, compiled.BACKEND = compiled.BACKEND, backend
    try:
        own = make_backend(path, rank=rank, world=world, lora=lora, trainer={"compile": True, "max_tokens_per_microbatch": 24} | trainer)
    finally:
        compiled.BACKEND = kept
    if lora is not None:
        stir(own, rank)
    own.step_rl(mixed_groups())
    return gradients(own)


@pytest.mark.parametrize("activations", [pytest.param("keep", marks=pytest.mark.full), "recompute"])
def test_gradients_are_those_of_plain_transformers(model: Path, activations: str) -> None:
    import torch._dynamo  # a second, for this file alone

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = compiled_gradients(0, 1, model, {"activations": activations}, "aot_eager")
    assert relative_difference(found, plain_gradients(model, mixed_groups())) < 1e-12
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 2 <= graphs <= 6  # before and behind attention, for every layer and row; once more where dynamo learns that a size changes


@pytest.mark.full
def test_gradients_of_adapters_are_pefts(model: Path) -> None:
    found = compiled_gradients(0, 1, model, {}, "aot_eager", LORA)
    assert relative_difference(found, peft_gradients(model, mixed_groups(), LORA)) < 1e-12


@pytest.mark.full
def test_gradients_on_two_ranks(model: Path, two_ranks: Pool) -> None:
    found = two_ranks.run(compiled_gradients, model, {"activations": "recompute"}, "aot_eager")[0]
    assert relative_difference(found, plain_gradients(model, mixed_groups())) < 1e-12


@pytest.mark.full
def test_gradients_of_generated_code(model: Path) -> None:
    torch.compiler.reset()
    assert relative_difference(compiled_gradients(0, 1, model, {}, "inductor"), plain_gradients(model, mixed_groups())) < 1e-12


def test_what_it_does_not_go_with() -> None:
    with pytest.raises(ValueError, match=r"trainer\.compile does not go with trainer\.prompt_sharing: leave one of them out"):
        TrainerConfig(compile=True, prompt_sharing=True)
