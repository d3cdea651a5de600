"""Reward models: batches of pairs of answers, from which a model with one output learns to tell the better one.

`RUN/model` is then an ordinary sequence classifier, and the reward function `reward_model` with `path = "RUN/model"`.
"""

from __future__ import annotations

from miles.config import Resolved
from miles.core.model.load import longest_sequence, tokenizer_of
from miles.data.preference import PairDataset, PairStream
from miles.run.held_out import HeldOut
from miles.run.preflight import check_supervised
from miles.run.recipe import RewardModelRecipe
from miles.run.supervised import supervise
from trainer.actor import TrainerGroup


def run(recipe: Resolved[RewardModelRecipe], *, resume: bool = False) -> int:
    """`miles reward`: check, read the pairs, start the trainer, train, leave nothing running. Returns the exit code."""
    check_supervised(recipe, resume=resume)
    config = recipe.config
    dataset = PairDataset.load(config.data, tokenizer_of(config.model), longest_sequence(config.model))
    held_out = HeldOut.load(config.evaluate, config.model)
    stream = PairStream(dataset, config.run.seed)
    return supervise("reward", config, stream, TrainerGroup.step_pairs, pairs=config.reward_model, held_out=held_out, resume=resume)
