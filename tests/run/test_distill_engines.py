"""`miles distill` with a teacher in an engine of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles.core.model.tiny import make_tiny_model
from miles.data.toy import ALPHABET
from miles.run import rl
from rollout.teacher import engines
from tests.rollout.test_teacher_engines import DiesOnce
from tests.run.distill_cases import distill_recipe, surer
from tests.run.runs import make_task, records


def pairs_teacher(folder: Path) -> Path:
    """A teacher whose tokenizer writes two letters in one token: what the student does in 2n tokens, it does in n."""
    stand_ins = {chr(0x100 + i): pair for i, pair in enumerate(a + b for a in ALPHABET for b in ALPHABET)}
    model = surer(make_tiny_model(folder, alphabet=ALPHABET + "".join(stand_ins), hidden=48, layers=1, context=64, seed=1))
    core = json.loads((model / "tokenizer.json").read_text())
    core["model"]["vocab"] = {stand_ins.get(token, token): index for token, index in core["model"]["vocab"].items()}
    core["model"]["merges"] = [list(pair) for pair in stand_ins.values()]
    (model / "tokenizer.json").write_text(json.dumps(core))
    return model


@pytest.mark.usefixtures("ray_cluster")
def test_a_student_learns_from_an_engine_that_dies_once_and_has_another_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "TeacherActor", DiesOnce)
    task = make_task(tmp_path) | {"teacher": pairs_teacher(tmp_path / "teacher")}
    evaluation = ["evaluate.every=12", f'evaluate.data.paths=["{task["test"]}"]', "evaluate.max_new_tokens=6", "evaluate.samples_per_prompt=4"]
    rl.run(distill_recipe(task, tmp_path / "run", "distill.place=engine", "distill.divergence=sampled", *evaluation))
    first, last = records(tmp_path / "run")[0], records(tmp_path / "run")[-1]
    print(first["eval/distill_kl"], last["eval/distill_kl"], last["distill/uncompared"])
    assert (tmp_path / "run" / "logs" / "calls").stat().st_size > 1, "the engine died over the first call and was started again"
    assert last["eval/distill_kl"] < first["eval/distill_kl"] / 2
    assert last["distill/uncompared"] == 0
