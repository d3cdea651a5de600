"""The samples that people read beside the curves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.config import load
from miles.core.model.load import load_tokenizer
from miles.data.types import Group, Prompt, Sample, Status
from miles.run.assemble import RLRun
from miles.run.evaluate import Evaluation
from miles.run.recipe import RLRecipe
from miles.run.samples import sample_table
from miles.tracking.tracker import TABLES_FILE, Tracker


def group(tokenizer: Any, question: str, answer: str, reward: float | None) -> Group:
    tokens, response = tokenizer.encode(question), tokenizer.encode(answer)
    sample = Sample(
        sample_id="", group_id="", tokens=[*tokens, *response], prompt_length=len(tokens), loss_mask=[True] * len(response),
        logprobs=[0.0] * len(response), weight_versions=[3] * len(response), status=Status.TRUNCATED, reward=reward,
    )  # fmt: skip
    return Group(claim_id=0, prompt=Prompt(prompt_id=0, tokens=np.array(tokens), text=question, columns={}), samples=(sample,))


def test_a_row_is_the_first_sample_of_a_group_and_rows_are_bounded(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    groups = [group(tokenizer, "1+1=", "2", 1.0), group(tokenizer, "2+2=", "55", None), group(tokenizer, "3+3=", "6", 1.0)]
    columns, rows = sample_table(groups, tokenizer, 2)
    assert [dict(zip(columns, row, strict=True)) for row in rows] == [
        {"prompt": "1+1=", "response": "2", "reward": 1.0, "tokens": 1, "status": "truncated"},
        {"prompt": "2+2=", "response": "55", "reward": None, "tokens": 2, "status": "truncated"},
    ]


@pytest.mark.parametrize(("sample_every", "tables"), [(10, [[3, "evaluation", "2"]]), (0, [])])
def test_an_evaluation_leaves_a_table_of_answers_unless_tables_are_off(tiny_model: Path, tmp_path: Path, sample_every: int, tables: list[Any]) -> None:
    tokenizer = load_tokenizer(tiny_model)

    class Evaluator:
        async def run(self, *_: object) -> Evaluation:
            return Evaluation({}, (group(tokenizer, "1+1=", "2", 1.0),))

    recipe = load(RLRecipe, None, [f"model.path={tiny_model}", "evaluate.every=3", f"tracking.sample_every={sample_every}"]).config
    with Tracker(recipe.tracking, tmp_path, {}, None) as tracker:
        parts: dict[str, Any] = dict.fromkeys(("folder", "trainer", "fleet", "producer", "sync", "checkpoints", "live"))
        run = RLRun(**parts, recipe=recipe, evaluator=Evaluator(), tracker=tracker, tokenizer=tokenizer, resume=False, version=3)  # type: ignore[arg-type]
        asyncio.run(run.evaluate())
    written = [json.loads(line) for line in (tmp_path / TABLES_FILE).read_text().splitlines()]
    assert [[r["step"], r["table"], r["rows"][0][1]] for r in written] == tables
