"""Which rank holds what under Megatron's parallelism: arithmetic on numbers, without torch, so that a recipe is checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import TrainerConfig


@dataclass(frozen=True)
class Layout:
    """`ranks = data x tensor x pipeline`, numbered with tensor fastest and pipeline slowest, as Megatron-Core orders them.

    Experts are spread over `expert` of the data x tensor ranks of a stage and are whole there. `chunks` is the number of pieces of
    the model on each stage (more than one: the interleaved schedule).

    Example: 8 ranks, tensor 2, pipeline 2: rank 5 = tensor 1, data 0, stage 1.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    chunks: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    def place(self, rank: int) -> Place:
        tensor, rest = rank % self.tensor, rank // self.tensor
        data, stage = rest % self.data, rest // self.data
        within = rank % (self.data * self.tensor)
        return Place(tensor=tensor, data=data, stage=stage, expert=within % self.expert, expert_data=within // self.expert)


@dataclass(frozen=True)
class Place:
    """A rank's coordinates. `expert`: which share of the experts it holds; `expert_data`: which copy of that share."""

    tensor: int
    data: int
    stage: int
    expert: int
    expert_data: int


def layout_of(config: TrainerConfig) -> Layout:
    """Raises ValueError, with the arithmetic, where the ranks do not divide into the parts."""
    tensor, pipeline, expert = config.tensor_parallel, config.pipeline_parallel, config.expert_parallel
    if config.ranks % (tensor * pipeline):
        raise ValueError(
            f"trainer.ranks = {config.ranks} does not divide by trainer.tensor_parallel x trainer.pipeline_parallel = {tensor} x {pipeline} "
            f"= {tensor * pipeline}: ranks = data-parallel x {tensor * pipeline}; use {_nearest(config.ranks, tensor * pipeline)} ranks"
        )
    within = config.ranks // pipeline
    if within % expert:
        raise ValueError(
            f"trainer.expert_parallel = {expert} does not divide the {within} ranks of a pipeline stage "
            f"(trainer.ranks / trainer.pipeline_parallel = {config.ranks} / {pipeline})"
        )
    if config.pipeline_chunks > 1 and pipeline < 3:
        raise ValueError(
            f"trainer.pipeline_chunks = {config.pipeline_chunks} needs trainer.pipeline_parallel of at least 3, not {pipeline}: of two stages each is "
            "before and behind the other, and Megatron-Core's interleaved messages would be taken for each other"
        )
    return Layout(data=within // tensor, tensor=tensor, pipeline=pipeline, expert=expert, chunks=config.pipeline_chunks)


def _nearest(ranks: int, unit: int) -> str:
    below = ranks // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
