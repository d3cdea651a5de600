"""Preference optimisation: batches of pairs of answers, from each of which the policy learns what is better than what."""

from __future__ import annotations

from miles.config import Resolved
from miles.core.model.load import longest_sequence, tokenizer_of
from miles.data.preference import PairDataset, PairStream
from miles.run.held_out import HeldOut
from miles.run.preflight import check_supervised
from miles.run.recipe import PreferenceRecipe
from miles.run.supervised import supervise
from trainer.actor import TrainerGroup


def run(recipe: Resolved[PreferenceRecipe], *, resume: bool = False) -> int:
    """`miles prefer`: check, read the pairs, start the trainer, train, leave nothing running. Returns the exit code."""
    check_supervised(recipe, resume=resume)
    config = recipe.config
    dataset = PairDataset.load(config.data, tokenizer_of(config.model), longest_sequence(config.model))
    held_out = HeldOut.load(config.evaluate, config.model, at_least=2 if config.preference.objective == "kto" else 1)
    stream = PairStream(dataset, config.run.seed)
    return supervise("prefer", config, stream, TrainerGroup.step_pairs, pairs=config.preference, held_out=held_out, resume=resume)
