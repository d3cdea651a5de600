"""Supervised fine-tuning: batches of conversations to imitate, one optimizer step each."""

from __future__ import annotations

from miles.config import Resolved
from miles.core.model.load import longest_sequence, tokenizer_of
from miles.data.sft import SFTDataset, SFTStream
from miles.run.preflight import check_supervised
from miles.run.recipe import SFTRecipe
from miles.run.supervised import supervise
from trainer.actor import TrainerGroup


def run(recipe: Resolved[SFTRecipe], *, resume: bool = False) -> int:
    """`miles sft`: check, read the data, start the trainer, train, leave nothing running. Returns the exit code."""
    check_supervised(recipe, resume=resume)
    config = recipe.config
    dataset = SFTDataset.load(config.data, tokenizer_of(config.model), longest_sequence(config.model))
    return supervise("sft", config, SFTStream(dataset, config.run.seed), TrainerGroup.step_sft, resume=resume)
