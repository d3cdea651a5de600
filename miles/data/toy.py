"""The quickstart's task: reverse a word of 3 to 5 letters from a 10-letter alphabet."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ALPHABET = "abcdefghij"
LENGTHS = (3, 4, 5)


def write_reverse_task(folder: Path | str, seed: int = 0, *, train: int = 8192, sft: int = 8192, test: int = 256) -> dict[str, Path]:
    """Write the task's three files and return their paths as `{"train": ..., "sft": ..., "test": ...}`.

    - `train.jsonl`: `train` rows `{"prompt": "abc", "answer": "cba"}` for RL.
    - `sft.jsonl`: `sft` rows `{"messages": [{user}, {assistant}]}` for SFT.
    - `test.jsonl`: `test` distinct words, like train, none of which is in the other two files.

    Lengths are drawn evenly, so short words repeat within a training file. The same arguments give the same bytes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"reverse/{seed}")
    held_out: dict[str, None] = {}
    while len(held_out) < test:
        held_out[_word(rng)] = None
    paths = {name: folder / f"{name}.jsonl" for name in ("train", "sft", "test")}
    _write(paths["test"], held_out, _question)
    _write(paths["train"], _words(rng, train, held_out), _question)
    _write(paths["sft"], _words(rng, sft, held_out), _conversation)
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


def _question(word: str) -> dict[str, Any]:
    return {"prompt": word, "answer": word[::-1]}


def _conversation(word: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}


def _write(path: Path, words: Iterable[str], row: Callable[[str], dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row(word)) + "\n" for word in words), encoding="utf-8")
