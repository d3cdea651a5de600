"""The steps of an answer: where a pattern ends them, and what rewards of each of them make of a sample.

An answer that is written in steps (lines of a proof, moves of a game) may be rewarded step by step, as process reward models do (Lightman
et al., "Let's Verify Step by Step", arXiv 2305.20050). Its steps are then the sample's turns (`miles.data.turns`), so that what gives
credit by turns (`turn_grpo`, `gigpo`) or by tokens (`gae`) has their rewards where they were earned. The state in which a step begins is
all that the answer said before it: answers of a group that began alike meet in the same states.

Example: with the pattern "\\n" the answer "2+3=5\\n5*4=20\\n" has the steps "2+3=5\\n" and "5*4=20\\n".
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import regex

from miles.config import ConfigError
from miles.data.pieces import Pieces
from miles.data.turns import TurnRecord, with_turns
from miles.data.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Step:
    """Response tokens `start` to `stop` (excluded), what they write without special tokens, and a digest of all that was written before."""

    start: int
    stop: int
    text: str
    state: str


class StepCutter:
    """Cuts answers after each match of `pattern`, a regular expression; what is left after the last match is a step, too.

    Raises:
        ConfigError: the bytes of this tokenizer's tokens are not known.
    """

    def __init__(self, pattern: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._pattern = regex.compile(pattern)
        try:
            self._pieces = Pieces(tokenizer)
        except ValueError as error:
            raise ConfigError(f"reward.steps cuts answers between tokens: {error}") from error
        self._silent = set(tokenizer.all_special_ids)

    def __call__(self, sample: Sample, timeout_s: float | None = None) -> list[Step]:
        """The steps in order. A token that ends one and begins another belongs to the first; tokens that write nothing begin no step.

        Other threads run while it looks for matches. Raises TimeoutError where that takes longer than `timeout_s`: some patterns take a time
        that doubles with every character of an unlucky answer.
        """
        pieces = self._written(sample)
        if not pieces:
            return []
        # Bytes that are no character survive the way there and back as one character each.
        text = b"".join(pieces).decode(errors="surrogateescape")
        ends = list(accumulate(map(len, pieces)))
        matches = [found.end() for found in self._pattern.finditer(text, timeout=timeout_s, concurrent=True) if found.end() > found.start()]
        last_bytes = accumulate(len(text[start:stop].encode(errors="surrogateescape")) for start, stop in pairwise([0, *matches]))
        written = len(pieces)
        while written and not pieces[written - 1]:
            written -= 1
        cuts = sorted({1 + bisect_left(ends, byte) for byte in last_bytes})
        return _between(pieces, [0, *(cut for cut in cuts if cut < written), len(pieces)])

    def uncut(self, sample: Sample) -> list[Step]:
        """All of the answer as one step."""
        pieces = self._written(sample)
        return _between(pieces, [0, len(pieces)]) if pieces else []

    def _written(self, sample: Sample) -> list[bytes]:
        """What each token of the response writes."""
        ids = sample.response_tokens.tolist()
        return [b"" if token in self._silent else piece for token, piece in zip(ids, self._pieces.of(ids), strict=True)]


def _between(pieces: Sequence[bytes], edges: Sequence[int]) -> list[Step]:
    steps, before = [], hashlib.blake2b(digest_size=8)
    for start, stop in pairwise(edges):
        written = b"".join(pieces[start:stop])
        steps.append(Step(start, stop, written.decode(errors="replace"), before.hexdigest()))
        before.update(written)
    return steps


def with_steps(sample: Sample, steps: Sequence[Step], rewards: Sequence[float]) -> Sample:
    """`sample` with its steps as turns, each with its reward, which is a part of the sample's."""
    turns = [TurnRecord(start=step.start, stop=step.stop, reward=reward, state=step.state) for step, reward in zip(steps, rewards, strict=True)]
    return with_turns(sample, turns)
