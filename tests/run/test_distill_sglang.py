"""A teacher that SGLang serves. What a student learned is measured by transformers on its exported model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from algorithms.config import AlgorithmConfig
from algorithms.distillation.config import DistillConfig
from miles.core.model.config import ModelConfig
from miles.core.model.load import load_tokenizer
from miles.core.model.tiny import make_tiny_model
from miles.data.config import PromptDataConfig
from miles.data.prompts import PromptDataset
from miles.data.toy import ALPHABET
from miles.data.types import Group, Prompt
from miles.run import rl
from miles.run.teaching import Teaching
from rollout.actor import GroupTask, _sample
from rollout.engines.contracts import Request, SamplingParams
from rollout.engines.sglang_address import SGLangAddress
from rollout.engines.sglang_engine import SGLangEngine
from rollout.engines.torch_engine import TorchEngine
from tests.conformance.engine_bench import Bench
from tests.conftest import TINY_ALPHABET
from tests.run.distill_cases import distill_recipe, divergence, surer
from tests.run.runs import make_task, records
from trainer.config import TrainerConfig
from trainer.fsdp.backend import FSDPBackend

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
STEPS, TOP_K = 12, 16


@pytest.fixture
def served(sglang_engine: SGLangEngine, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """The reversal task with a student of the tiny model's tokenizer, and that model made surer as the teacher, which the session's server has."""
    teacher = surer(Path(shutil.copytree(tiny_model, tmp_path / "teacher")))
    bench = Bench(sglang_engine, tiny_model)
    bench.release()
    bench.publish(load_file(teacher / "model.safetensors"), tmp_path)
    monkeypatch.setenv("TEACHER_KEY", sglang_engine._server._key)
    yield make_task(tmp_path) | {"model": make_tiny_model(tmp_path / "student", alphabet=TINY_ALPHABET, hidden=32, context=64), "teacher": teacher}
    bench.publish(bench.base, tmp_path)


def answers(engine: TorchEngine, prompts: Sequence[Prompt], step: int) -> list[Group]:
    """One answer to each prompt, sampled at the engine's present weights."""
    sampling = [SamplingParams(max_new_tokens=6, stop_token_ids=(3,), seed=1000 * step + i) for i in range(len(prompts))]
    requests = [Request(request_id=str(i), prompt=prompt.tokens, sampling=s) for i, (prompt, s) in enumerate(zip(prompts, sampling, strict=True))]
    tasks = [GroupTask(claim_id=i, prompt=prompt, sampling=(s,), timeout_s=60) for i, (prompt, s) in enumerate(zip(prompts, sampling, strict=True))]
    made = asyncio.run(engine.generate(requests))
    return [Group(claim_id=t.claim_id, prompt=t.prompt, samples=(_sample(t, r, g),)) for t, r, g in zip(tasks, requests, made, strict=True)]


def test_the_divergence_from_a_teacher_that_sglang_serves_halves(served: dict[str, Path], sglang_engine: SGLangEngine, tmp_path: Path) -> None:
    """The loop of `miles distill` in one process; as a run of its own it is below."""
    model = ModelConfig(path=str(served["model"]))
    distill = DistillConfig(teacher=str(served["teacher"]), place="address", address=sglang_engine.url, api_key_env="TEACHER_KEY", top_k=TOP_K)
    trainer = FSDPBackend(
        model,
        TrainerConfig(lr=1e-2),
        AlgorithmConfig(),
        temperature=1.0,
        max_new_tokens=6,
        seed=0,
        total_steps=STEPS,
        rank=0,
        world=1,
        distill=distill,
    )
    teaching = Teaching(engine=SGLangAddress(sglang_engine.url, api_key_env="TEACHER_KEY", timeout_s=60), reader=None, top_k=TOP_K)
    engine = TorchEngine(model, max_running=32, threads=1)
    student = Bench(engine, served["model"])
    data = PromptDataset.load(PromptDataConfig(paths=[str(served["train"])]), load_tokenizer(served["model"]), 50)
    for step in range(STEPS):
        groups = answers(engine, [data[i] for i in range(len(data))], step)
        trainer.step_rl(asyncio.run(teaching.teach(groups)))
        student.publish(dict(trainer.weight_tensors([spec.name for spec in trainer.weight_specs()])), tmp_path)
    asyncio.run(engine.close())
    trainer.export(tmp_path / "after")
    before, after = (divergence(path, served["teacher"], served["test"]) for path in (served["model"], tmp_path / "after"))
    print(f"\nKL to the teacher: {before:.4f} -> {after:.4f}")
    assert after < before / 2


@pytest.mark.full
@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen"])
def test_a_run_with_a_teacher_behind_an_address(served: dict[str, Path], sglang_engine: SGLangEngine, tmp_path: Path, kind: str) -> None:
    place = ["distill.place=address", f"distill.address={sglang_engine.url}", "distill.api_key_env=TEACHER_KEY", f"distill.divergence={kind}"]
    rl.run(distill_recipe(served, tmp_path / "run", *place, f"distill.top_k={TOP_K}"))
    before, after = (divergence(path, served["teacher"], served["test"]) for path in (served["model"], tmp_path / "run" / "model"))
    print(f"\nKL to the teacher by {kind}: {before:.4f} -> {after:.4f}")
    assert after < before / 2
    assert all(record["seconds/teacher"] > 0 for record in records(tmp_path / "run") if "loss/total" in record)


@pytest.mark.full
def test_a_teacher_in_a_server_of_its_own_ends_with_the_run(tmp_path: Path) -> None:
    """Its server is killed by its process id in the middle of the run, and a fresh one goes on."""
    task = make_task(tmp_path) | {"teacher": surer(make_tiny_model(tmp_path / "teacher", alphabet=ALPHABET, hidden=48, layers=1, context=64, seed=1))}
    place = ["distill.place=engine", "teacher_engine.engine=sglang", "distill.divergence=forward", "distill.top_k=8"]
    watcher = threading.Thread(target=kill_a_server_once, args=(tmp_path / "run",), daemon=True)
    watcher.start()
    rl.run(distill_recipe(task, tmp_path / "run", *place))
    watcher.join(10)
    assert not watcher.is_alive(), "the server was killed"
    before, after = (divergence(path, task["teacher"], task["test"]) for path in (task["model"], tmp_path / "run" / "model"))
    assert after < before / 2
    assert servers_of(tmp_path / "run") == []


def servers_of(folder: Path) -> list[int]:
    """Process ids of the SGLang servers whose output goes to the run's logs: the launchers, which lead their groups."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = str((process / "fd" / "1").readlink()).startswith(str(folder / "logs"))
            if ours and b"rollout.engines.sglang_launcher" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def kill_a_server_once(folder: Path) -> None:
    """After the second step."""
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"loss/total"') < 2:
        time.sleep(0.05)
    os.kill(servers_of(folder)[0], signal.SIGKILL)
