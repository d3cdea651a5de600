"""The quickstart's task: reverse a word of 3 to 5 letters from a 10-letter alphabet."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

ALPHABET = "abcdefghij"
LENGTHS = (3, 4, 5)
T = TypeVar("T")


def write_reverse_task(folder: Path | str, seed: int = 0, *, train: int = 8192, sft: int = 8192, test: int = 256, pairs: int = 8192) -> dict[str, Path]:
    """Write the task's four files and return their paths as `{"train": ..., "sft": ..., "test": ..., "pairs": ...}`.

    - `train.jsonl`: `train` rows `{"prompt": "abc", "answer": "cba"}` for RL.
    - `sft.jsonl`: `sft` rows `{"messages": [{user}, {assistant}]}` for SFT.
    - `test.jsonl`: `test` distinct words, like train, none of which is in the other files.
    - `pairs.jsonl`: `pairs` rows `{"prompt": "abc", "chosen": "cba", "rejected": "bca"}`: the rejected answer has the same letters in
      another order.

    Lengths are drawn evenly, so short words repeat within a training file. The same arguments give the same bytes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"reverse/{seed}")
    held_out: dict[str, None] = {}
    while len(held_out) < test:
        held_out[_word(rng)] = None
    paths = {name: folder / f"{name}.jsonl" for name in ("train", "sft", "test", "pairs")}
    _write(paths["test"], held_out, _question)
    _write(paths["train"], _words(rng, train, held_out), _question)
    _write(paths["sft"], _words(rng, sft, held_out), _conversation)
    _write(paths["pairs"], _mistakes(rng, pairs, held_out), _pair)  # last, so that the files above do not depend on it
    return paths


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(ALPHABET, k=rng.choice(LENGTHS)))


def _words(rng: random.Random, count: int, excluded: dict[str, None]) -> list[str]:
    words: list[str] = []
    while len(words) < count:
        word = _word(rng)
        if word not in excluded:
            words.append(word)
    return words


def _mistakes(rng: random.Random, count: int, excluded: dict[str, None]) -> list[tuple[str, str]]:
    """Words and their letters in another order than reversed."""
    found: list[tuple[str, str]] = []
    while len(found) < count:
        (word,) = _words(rng, 1, excluded)
        wrong = "".join(rng.sample(word, len(word)))
        if wrong != word[::-1]:
            found.append((word, wrong))
    return found


def _question(word: str) -> dict[str, Any]:
    return {"prompt": word, "answer": word[::-1]}


def _conversation(word: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}


def _pair(words: tuple[str, str]) -> dict[str, Any]:
    word, wrong = words
    return {"prompt": word, "chosen": word[::-1], "rejected": wrong}


def _write(path: Path, words: Iterable[T], row: Callable[[T], dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row(word)) + "\n" for word in words), encoding="utf-8")
