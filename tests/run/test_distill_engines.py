"""`miles distill` with a teacher in an engine of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles.core.model.tiny import make_tiny_model
from miles.data.toy import ALPHABET
from miles.run import rl
from rollout.teacher import engines
from tests.rollout.test_teacher_engines import DiesOnce
from tests.run.distill_cases import distill_recipe, surer
from tests.run.runs import make_task, records


@pytest.mark.usefixtures("ray_cluster")
def test_a_student_learns_from_an_engine_that_dies_once_and_has_another_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "TeacherActor", DiesOnce)
    teacher = make_tiny_model(tmp_path / "teacher", alphabet=ALPHABET, hidden=48, layers=1, context=64, seed=1, pairs=True)
    task = make_task(tmp_path) | {"teacher": surer(teacher)}
    evaluation = ["run.steps=18", "evaluate.every=18", f'evaluate.data.paths=["{task["test"]}"]', "evaluate.max_new_tokens=6", "evaluate.samples_per_prompt=4"]
    rl.run(distill_recipe(task, tmp_path / "run", "distill.place=engine", "distill.divergence=sampled", *evaluation))
    first, last = records(tmp_path / "run")[0], records(tmp_path / "run")[-1]
    print(first["eval/distill_kl"], last["eval/distill_kl"], last["distill/uncompared"])
    assert (tmp_path / "run" / "logs" / "calls").stat().st_size > 1, "the engine died over the first call and was started again"
    assert last["eval/distill_kl"] < first["eval/distill_kl"] / 2
    assert last["distill/uncompared"] == 0
