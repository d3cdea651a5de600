"""The command as a user meets it: real subprocesses, exit codes and messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles.cli import COMMANDS

RL_RECIPE = """
[run]
folder = "run"
[model]
path = "model"
[rollout]
prompts_per_step = 6
samples_per_prompt = 4
[trainer]
optimizer_steps_per_batch = 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rl.toml").write_text(RL_RECIPE, encoding="utf-8")
    return tmp_path


def miles(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


def refused(folder: Path, *arguments: str, **environment: str) -> str:
    """The message of a command that must end with exit code 2 and without a traceback."""
    done = miles(folder, *arguments, **environment)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_help_names_every_command(folder):
    shown = miles(folder, "--help").stdout
    assert all(f"miles {name} " in shown or f"miles {name}\n" in shown for name in COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["rl", "--help"], ["config", "rl.toml"]])
def test_help_and_config_import_nothing_heavy(folder, arguments):
    code = (
        "import sys\nfrom miles.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "print('HEAVY', sorted({'torch', 'ray', 'transformers', 'wandb', 'sglang', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_no_command_shows_the_help_and_fails(folder):
    done = miles(folder)
    assert done.returncode == 2
    assert "usage: miles COMMAND" in done.stdout


def test_a_misspelt_command_names_the_nearest(folder):
    assert "unknown command 'reprot'; did you mean 'report'?" in refused(folder, "reprot", "run")


def test_a_misspelt_option_on_the_command_line_names_the_nearest(folder):
    assert "unknown option 'trainer.lrr' (command line); did you mean 'trainer.lr'?" in refused(folder, "rl", "rl.toml", "trainer.lrr=1e-4")


def test_a_misspelt_option_in_the_recipe_names_the_line_and_the_nearest(folder):
    (folder / "rl.toml").write_text(RL_RECIPE.replace("prompts_per_step", "prompt_per_step"), encoding="utf-8")
    assert "unknown option 'rollout.prompt_per_step' (rl.toml:7); did you mean 'rollout.prompts_per_step'?" in refused(folder, "rl", "rl.toml")


def test_a_misspelt_flag_names_the_nearest(folder):
    assert "unknown option '--resum'; did you mean '--resume'?" in refused(folder, "rl", "rl.toml", "--resum")


def test_a_recipe_option_with_dashes_is_explained(folder):
    assert "without dashes: trainer.lr=1" in refused(folder, "rl", "rl.toml", "--trainer.lr=1")


def test_a_missing_recipe_is_named(folder):
    assert "cannot read the recipe 'nothing.toml': No such file" in refused(folder, "sft", "nothing.toml")


def test_an_absent_recipe_argument_is_named_alone(folder):
    message = refused(folder, "rl")
    assert "RECIPE.toml" in message
    assert "key=value" not in message


def test_batch_sizes_that_do_not_divide_show_the_arithmetic(folder):
    message = refused(folder, "rl", "rl.toml", "trainer.optimizer_steps_per_batch=4")
    assert "rollout.prompts_per_step = 6" in message
    assert "6 / 4 = 1.50" in message


def test_overrides_may_stand_on_both_sides_of_a_flag(folder):
    assert "'run' holds no run to go on with" in refused(folder, "rl", "rl.toml", "run.steps=3", "--resume", "trainer.lr=1e-4")


def test_config_shows_each_value_with_its_origin(folder):
    rows = {line.split()[0]: line.split()[1:] for line in miles(folder, "config", "rl.toml", "trainer.lr=1e-4").stdout.splitlines() if line.strip()}
    assert rows["rollout.prompts_per_step"] == ["6", "rl.toml:7"]
    assert rows["trainer.lr"] == ["0.0001", "command", "line"]
    assert rows["rollout.temperature"] == ["1.0", "default"]


def test_config_shows_the_batch_arithmetic(folder):
    assert "6 prompts x 4 samples = 24 sequences = 2 optimizer steps x 12 sequences (3 whole groups)" in miles(folder, "config", "rl.toml").stdout


def test_config_shows_no_secret(folder):
    done = miles(folder, "config", "rl.toml", 'rollout.sglang_args={api_key="hunter2hunter2"}')
    assert done.returncode == 0
    assert "hunter2" not in done.stdout


def test_config_starts_nothing_and_writes_nothing(folder):
    miles(folder, "config", "rl.toml")
    assert [path.name for path in folder.iterdir()] == ["rl.toml"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('batch_size = 4\n[model]\npath = "m"\n', "sft"),
        ('[model]\npath = "m"\n[data]\nmessages_column = "messages"\n', "sft"),
        ('[model]\npath = "m"\n[evaluate]\ngreedy = true\n', "evaluate"),
        ('[model]\npath = "m"\n[algorithm]\nscale = "none"\n', "rl"),
    ],
)
def test_config_tells_the_kind_of_recipe_from_its_sections(tmp_path, text, kind):
    (tmp_path / "some.toml").write_text(text, encoding="utf-8")
    assert miles(tmp_path, "config", "some.toml").stdout.startswith(f"# a recipe for `miles {kind}`")


def test_config_of_a_recipe_of_no_clear_kind_asks_for_it(tmp_path):
    (tmp_path / "some.toml").write_text('[model]\npath = "m"\n', encoding="utf-8")
    assert "pass --kind rl" in refused(tmp_path, "config", "some.toml")
    assert miles(tmp_path, "config", "some.toml", "--kind", "sft").returncode == 0


def test_a_report_of_no_run_folder_is_refused(folder):
    assert "'.' is no run folder: it has no metrics.jsonl" in refused(folder, "report", ".")


def test_doctor_finds_a_stale_ray_address_and_fails(folder):
    done = miles(folder, "doctor", RAY_ADDRESS="127.0.0.1:9")
    assert done.returncode == 1
    assert "RAY_ADDRESS = '127.0.0.1:9' is stale, nothing answers there: `unset RAY_ADDRESS`" in done.stdout


CRASH = """
import sys, time
from miles import cli
def crash(arguments):
    {body}
cli.COMMANDS["doctor"] = crash
sys.exit(cli.main(["doctor"]))
"""


def command_that(body: str) -> list[str]:
    return [sys.executable, "-c", CRASH.format(body=body)]


def test_a_failure_that_is_not_the_users_keeps_its_traceback(folder):
    done = subprocess.run(command_that("import json; json.loads('{')"), cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "JSONDecodeError" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_unwinds_and_has_its_exit_code(folder, number, code):
    body = "\n    ".join(["try:", "    print('up', flush=True); time.sleep(60)", "finally:", "    print('cleaned up', flush=True)"])
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    heeding = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    process = subprocess.Popen(command_that(body), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeding)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, output) == (code, "cleaned up\n")
    assert "Traceback" not in errors
