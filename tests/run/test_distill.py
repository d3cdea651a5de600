"""`miles distill` with everything real, and what it refuses before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from miles.config import ConfigError, Resolved, load
from miles.core.model.load import load_tokenizer
from miles.core.model.tiny import make_tiny_model
from miles.data.toy import ALPHABET
from miles.run import preflight, rl
from miles.run.explain import infer_kind
from miles.run.recipe import DistillRecipe, RLRecipe
from miles.run.teacher import check_teacher
from tests.run.runs import make_task, records, rl_overrides


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reversal task, and a teacher of another width that is surer than a random model: its logits are scaled by 6."""
    folder = tmp_path_factory.mktemp("task")
    teacher = make_tiny_model(folder / "teacher", alphabet=ALPHABET, hidden=48, layers=1, context=64, seed=1)
    weights = load_file(teacher / "model.safetensors")
    weights["model.norm.weight"] *= 6
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    return make_task(folder) | {"teacher": teacher}


def distill_recipe(task: dict[str, Path], folder: Path, *overrides: str) -> Resolved[RLRecipe]:
    common = [item for item in rl_overrides(task, folder) if not item.startswith("reward.")]
    resolved: Resolved[RLRecipe] = load(DistillRecipe, None, [*common, f"distill.teacher={task['teacher']}", "rollout.samples_per_prompt=1", *overrides])
    return resolved


@pytest.mark.usefixtures("ray_cluster")
def test_the_divergence_from_the_teacher_halves_on_held_out_prompts(task: dict[str, Path], tmp_path: Path) -> None:
    """Twelve steps of groups of one, without any reward."""
    overrides = ("run.steps=12", "rollout.prompts_per_step=8", "evaluate.every=12", f'evaluate.data.paths=["{task["test"]}"]')
    rl.run(distill_recipe(task, tmp_path / "run", *overrides, "evaluate.max_new_tokens=6", "evaluate.samples_per_prompt=4"))
    first, last = records(tmp_path / "run")[0], records(tmp_path / "run")[-1]
    assert last["eval/distill_kl"] < first["eval/distill_kl"] / 2
    assert "eval/pass_at_1" not in last, "without a reward nothing is right or wrong"


def test_a_recipe_with_a_teacher_is_known_by_it() -> None:
    assert infer_kind("scripts/recipes/quickstart_distill.toml") == "distill"


def refused(task: dict[str, Path], folder: Path, *overrides: str) -> str:
    """What the first check that says no says: of the values, of the files, of the teacher."""
    with pytest.raises(ConfigError) as caught:
        check_all(task, distill_recipe(task, folder / "run", *overrides))
    return str(caught.value)


def check_all(task: dict[str, Path], recipe: Resolved[RLRecipe]) -> None:
    preflight.check_rl(recipe)
    assert isinstance(recipe.config, DistillRecipe)
    check_teacher(recipe.config, load_tokenizer(task["model"]))


def test_a_teacher_that_is_no_folder(task: dict[str, Path], tmp_path: Path) -> None:
    assert "distill.teacher = './none' is no folder" in refused(task, tmp_path, "distill.teacher=./none")


def test_a_teacher_with_another_tokenizer(task: dict[str, Path], tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", alphabet="zyx", hidden=16, context=64)
    message = refused(task, tmp_path, f"distill.teacher={other}")
    assert "has another tokenizer than the student" in message
    assert "'b' (student 9, there none)" in message


def test_a_larger_output_head_is_refused_by_whole_vocabulary_divergences_only(task: dict[str, Path], tmp_path: Path) -> None:
    padded = tmp_path / "padded"
    make_tiny_model(padded, alphabet=ALPHABET + "äöü", hidden=16, context=64)
    load_tokenizer(task["model"]).save_pretrained(padded)
    message = refused(task, tmp_path, f"distill.teacher={padded}")
    assert "distill.divergence = 'reverse' compares whole vocabularies" in message
    assert "use distill.divergence = 'sampled'" in message
    check_all(task, distill_recipe(task, tmp_path / "run", f"distill.teacher={padded}", "distill.divergence=sampled"))


def test_a_teacher_with_another_tokenizer_may_compare_texts(task: dict[str, Path], tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", alphabet="zyx", hidden=16, context=64)
    check_all(task, distill_recipe(task, tmp_path / "run", f"distill.teacher={other}", "distill.divergence=sampled"))


def test_a_tokenizer_whose_text_cannot_be_told(task: dict[str, Path], tmp_path: Path) -> None:
    student = make_tiny_model(tmp_path / "student", alphabet="zyx", hidden=16, context=64)
    core = json.loads((student / "tokenizer.json").read_text())
    (student / "tokenizer.json").write_text(json.dumps(core | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}))
    assert "their texts cannot be aligned" in refused(task | {"model": student}, tmp_path, "distill.divergence=sampled")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["distill.place=engine"], "over the whole vocabulary needs place = 'trainer': set distill.top_k"),
        (["distill.top_k=4"], "a teacher in the trainer compares whole vocabularies"),
        (["distill.place=engine", "distill.top_k=4", "distill.divergence=sampled"], "'sampled' the sampled tokens alone; leave top_k out"),
        (["distill.place=engine", "distill.top_k=20", "cluster.cpus=3"], "distill.top_k = 20 is more than the teacher's vocabulary of 19 tokens"),
        (["distill.place=address", "distill.top_k=4"], "place = 'address' and an address belong together"),
        (["distill.address=http://127.0.0.1:1"], "place = 'address' and an address belong together"),
        (["distill.api_key_env=KEY"], "a key is for place = 'address' alone"),
        (["distill.place=address", "distill.address=127.0.0.1:1", "distill.top_k=4"], "distill.address = '127.0.0.1:1' is no http address"),
        (["teacher_engine.threads=2"], "[teacher_engine] with distill.place = 'trainer', which starts no engine"),
        (["distill.place=engine", "distill.top_k=4", "teacher_engine.gpus_per_engine=1"], "teacher_engine.gpus_per_engine = 1 with engine = 'torch'"),
        (
            ["distill.place=engine", "distill.top_k=4", "teacher_engine.engine=sglang", "rollout.temperature=0.7"],
            "rollout.temperature = 0.7 with a teacher served by SGLang",
        ),
        (["distill.place=engine", "distill.top_k=4", "teacher_engine.engines=3", "cluster.cpus=4"], "3 teacher engines x 1 = 5 CPUs"),
    ],
)
def test_places_that_do_not_fit_together(task: dict[str, Path], tmp_path: Path, overrides: list[str], message: str) -> None:
    assert message in refused(task, tmp_path, *overrides)


def test_the_memory_of_a_teachers_engines_is_counted(task: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles.run.machine.free_memory", lambda: 2**20)
    message = refused(task, tmp_path, "distill.place=engine", "distill.top_k=4", "teacher_engine.engines=2", "cluster.cpus=4")
    assert "2 torch teacher engines x 450 = 900" in message


def test_a_teacher_of_a_shorter_context(task: dict[str, Path], tmp_path: Path) -> None:
    short = make_tiny_model(tmp_path / "short", alphabet=ALPHABET, hidden=16, context=32)
    assert "set model.context = 32, or less" in refused(task, tmp_path, f"distill.teacher={short}")


def test_a_weight_of_rewards_that_are_not_there(task: dict[str, Path], tmp_path: Path) -> None:
    assert "distill.policy_weight = 0.5 without a reward" in refused(task, tmp_path, "distill.policy_weight=0.5", "rollout.samples_per_prompt=2")


def test_a_group_of_one_with_rewards_that_teach(task: dict[str, Path], tmp_path: Path) -> None:
    overrides = ("distill.policy_weight=0.5", 'reward.functions=[{name="exact_match"}]')
    assert "a group of one has no baseline" in refused(task, tmp_path, *overrides)


def test_a_kl_taken_off_rewards_that_teach_nothing(task: dict[str, Path], tmp_path: Path) -> None:
    assert "algorithm.kl_in = 'reward' takes the KL off the rewards" in refused(task, tmp_path, "algorithm.kl_in=reward", "algorithm.kl_coef=0.1")


def test_an_entropy_guard_beside_a_teacher(task: dict[str, Path], tmp_path: Path) -> None:
    assert "algorithm.entropy_guard = 'kl_cov' ranks tokens" in refused(task, tmp_path, "algorithm.entropy_guard=kl_cov")


def test_dynamic_sampling_by_rewards_that_teach_nothing(task: dict[str, Path], tmp_path: Path) -> None:
    assert "algorithm.dynamic_sampling drops groups by their rewards" in refused(
        task, tmp_path, "algorithm.dynamic_sampling=true", "rollout.samples_per_prompt=2"
    )
