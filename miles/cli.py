"""The `miles` command. Thin: it reads the recipe, checks it, and calls `miles.run`. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from miles.config import ConfigError, Resolved, Section, describe, load, nearest
from miles.run.signals import unwind_when_terminated

OK, CRASHED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
_OUR_PACKAGES = {"miles", "rollout", "trainer", "weight_sync", "algorithms", "__main__"}

HELP = """\
Miles trains language models with reinforcement learning, on a laptop or a Ray cluster.

usage: miles COMMAND ...

  miles sft RECIPE.toml [key=value ...] [--resume]       supervised fine-tuning on conversations
  miles prefer RECIPE.toml [key=value ...] [--resume]    DPO, IPO, KTO, ORPO or SimPO on chosen and rejected answers
  miles reward RECIPE.toml [key=value ...] [--resume]    a reward model from chosen and rejected answers
  miles rl RECIPE.toml [key=value ...] [--resume]        reinforcement learning on prompts with rewards
  miles distill RECIPE.toml [key=value ...] [--resume]   on-policy distillation from a teacher
  miles evaluate RECIPE.toml [key=value ...]             pass@k of a model on prompts with rewards
  miles config RECIPE.toml [key=value ...]               every value, where it comes from, and the batch arithmetic; starts nothing
  miles weights RECIPE.toml [key=value ...]              every tensor, the trainer ranks that hold it, and its place in the engines; starts nothing
  miles engines RUN COUNT                                how many engines a run has that is at work: some join, or leave, between steps
  miles convert --to FORMAT SOURCE TARGET                weights between Hugging Face models, Megatron shards and checkpoints
  miles report RUN                                       one HTML page and a picture of a run folder
  miles doctor                                           is this machine ready? each item is ok, or says what to do

A recipe is a TOML file; a value given as key=value on the command line wins over it:

  miles rl scripts/recipes/quickstart_rl.toml run.steps=20 trainer.lr=1e-4 run.folder=runs/try

`miles COMMAND --help` lists a command's options. First time here? `bash scripts/quickstart` trains a small model in a few minutes.
Exit codes: 0 done, 1 a failure (with its traceback), 2 something you can change (with what to change), 130 interrupted.
"""


CONVERT = """\
From a model to shards that Megatron-Core's dist_checkpointing loads at any layout of ranks, and back again, bit for bit:

  miles convert --to megatron models/qwen3-8b models/qwen3-8b-megatron
  miles convert --to huggingface models/qwen3-8b-megatron models/again

A checkpoint of a run with trainer.backend = 'megatron' becomes a model that transformers and SGLang load, whatever its layout was. It
has no tokenizer, so say which model the run began from; it holds float32 masters, so say in which dtype to write:

  miles convert --to huggingface RUN/checkpoints/step_00000100 models/tuned --model models/qwen3-8b --dtype bfloat16

So does one of a run with trainer.backend = 'fsdp', and --model is the model directory that it began from; the whole model is in memory then.

It needs no GPU, no ranks and no Megatron-Core. Of Megatron's formats one file of weights is in memory at a time. TARGET appears when it is complete; what an
interrupted conversion leaves is called TARGET.partial, and nothing reads it. For models of type llama, qwen2, qwen3,
qwen3_moe and deepseek_v3.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return OK if arguments else WRONG_INPUT
    if arguments[0] == "--version":
        from miles import __version__

        print(f"miles {__version__}")
        return OK
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    unwind_when_terminated()
    try:
        return _dispatch(arguments[0], arguments[1:])
    except KeyboardInterrupt:
        print("miles: interrupted; everything this run started has been ended", file=sys.stderr)
        return INTERRUPTED
    except ValueError as error:
        if not _is_users(error):
            raise
        print(f"miles: {error}", file=sys.stderr)
        return WRONG_INPUT


def _dispatch(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}{nearest(name, list(COMMANDS))}")
    _prepare_process()
    return COMMANDS[name](arguments)


def _prepare_process() -> None:
    """Thread settings before torch is imported, and the working directory importable: a recipe may name a function in it."""
    from miles.core.environment import set_defaults

    set_defaults()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _rl(arguments: list[str]) -> int:
    from miles.run import preflight
    from miles.run.recipe import RLRecipe

    options = _parse(_run_parser("rl", "Reinforcement learning on prompts with rewards.", RLRecipe), arguments)
    recipe = load(RLRecipe, options.recipe, options.overrides)
    preflight.check_rl(recipe, resume=options.resume)  # also part of `run`; here it answers before the seconds that torch and Ray take to import
    if recipe.config.tenants:
        from miles.run.tenants import run
    else:
        from miles.run.rl import run

    return run(recipe, resume=options.resume)


def _distill(arguments: list[str]) -> int:
    from miles.run import preflight
    from miles.run.recipe import DistillRecipe, RLRecipe

    options = _parse(_run_parser("distill", "On-policy distillation from a teacher, with or without rewards.", DistillRecipe), arguments)
    recipe: Resolved[RLRecipe] = load(DistillRecipe, options.recipe, options.overrides)
    preflight.check_rl(recipe, resume=options.resume)  # also part of `run`; here it answers before the seconds that torch and Ray take to import
    from miles.run.rl import run

    return run(recipe, resume=options.resume)


def _sft(arguments: list[str]) -> int:
    from miles.run import preflight
    from miles.run.recipe import SFTRecipe

    options = _parse(_run_parser("sft", "Supervised fine-tuning on conversations.", SFTRecipe), arguments)
    recipe = load(SFTRecipe, options.recipe, options.overrides)
    preflight.check_supervised(recipe, resume=options.resume)  # also part of `run`; here it answers before the seconds that torch and Ray take to import
    from miles.run.sft import run

    return run(recipe, resume=options.resume)


def _prefer(arguments: list[str]) -> int:
    from miles.run import preflight
    from miles.run.recipe import PreferenceRecipe

    options = _parse(_run_parser("prefer", "DPO, IPO, KTO, ORPO or SimPO on chosen and rejected answers.", PreferenceRecipe), arguments)
    recipe = load(PreferenceRecipe, options.recipe, options.overrides)
    preflight.check_supervised(recipe, resume=options.resume)  # as in _sft
    from miles.run.prefer import run

    return run(recipe, resume=options.resume)


def _reward(arguments: list[str]) -> int:
    from miles.run import preflight
    from miles.run.recipe import RewardModelRecipe

    options = _parse(_run_parser("reward", "A reward model from chosen and rejected answers (Bradley-Terry).", RewardModelRecipe), arguments)
    recipe = load(RewardModelRecipe, options.recipe, options.overrides)
    preflight.check_supervised(recipe, resume=options.resume)  # as in _sft
    from miles.run.reward import run

    return run(recipe, resume=options.resume)


def _evaluate(arguments: list[str]) -> int:
    from miles.run import preflight
    from miles.run.recipe import EvaluateRecipe

    options = _parse(_run_parser("evaluate", "pass@k of a model on prompts with rewards.", EvaluateRecipe, resume=False), arguments)
    recipe = load(EvaluateRecipe, options.recipe, options.overrides)
    preflight.check_evaluate(recipe)  # also part of `run`; here it answers before the seconds that torch and Ray take to import
    from miles.run.evaluate import run

    for name, value in run(recipe).metrics.items():
        print(f"{name:<20} {value:.4f}")
    return OK


def _config(arguments: list[str]) -> int:
    from miles.run import explain

    parser = _parser("config", "Every resolved value, where it comes from, and the batch arithmetic. Nothing is started.")
    parser.add_argument("recipe", metavar="RECIPE.toml")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--kind", choices=list(explain.KINDS), help="what the recipe is for; by default its sections tell")
    options = _parse(parser, arguments)
    print(explain.explain(options.recipe, options.overrides, options.kind))
    return OK


def _weights(arguments: list[str]) -> int:
    parser = _parser("weights", "Every tensor of an update: the slices that trainer ranks hold, and where they lie in the engines. Nothing is started.")
    parser.add_argument("recipe", metavar="RECIPE.toml")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    options = _parse(parser, arguments)
    from miles.run import weights

    weights.show(options.recipe, options.overrides)
    return OK


def _report(arguments: list[str]) -> int:
    parser = _parser("report", "Write RUN/report.html (curves, samples, configuration) and RUN/curves.png.")
    parser.add_argument("run", metavar="RUN", help="a run folder")
    options = _parse(parser, arguments)
    from miles.run.report import page

    html, png = page.write(options.run)
    print(f"{html}\n{png}")
    return OK


def _engines(arguments: list[str]) -> int:
    parser = _parser("engines", "Change how many engines a run has that is at work: they join, or leave with what they have answered, between its steps.")
    parser.add_argument("run", metavar="RUN", help="its run folder")
    parser.add_argument("count", metavar="COUNT", type=int, help="how many it shall have")
    options = _parse(parser, arguments)
    from pathlib import Path

    from miles.run import engines

    engines.ask(Path(options.run), options.count)
    return OK


def _convert(arguments: list[str]) -> int:
    parser = _parser("convert", "Weights between Hugging Face models, Megatron-Core's dist_checkpointing and checkpoints of runs.", CONVERT)
    parser.add_argument("source", metavar="SOURCE", help="a Hugging Face model directory, a Megatron checkpoint, or a checkpoint of a run")
    parser.add_argument("target", metavar="TARGET", help="the directory to make; it must not be there yet")
    parser.add_argument("--to", choices=["megatron", "huggingface"], required=True, help="the format of TARGET")
    parser.add_argument(
        "--model", metavar="PATH", help="with --to huggingface: the model directory that has the configuration and tokenizer of a run's checkpoint"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the weights in TARGET; by default as they are in SOURCE")
    parser.add_argument("--file-gib", type=float, default=4.0, metavar="N", help="size of one file of weights, and so the memory that is needed (default 4)")
    options = _parse(parser, arguments)
    from miles.run.convert import run

    run(options.source, options.target, to=options.to, model=options.model, dtype=options.dtype, file_gib=options.file_gib)
    return OK


def _doctor(arguments: list[str]) -> int:
    _parse(_parser("doctor", "Is this machine ready? Each item is ok, or says what to do; exit 1 when something essential is missing."), arguments)
    from miles.run import doctor

    return doctor.run()


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "sft": _sft, "prefer": _prefer, "reward": _reward, "rl": _rl, "distill": _distill, "evaluate": _evaluate,
    "config": _config, "weights": _weights, "engines": _engines, "convert": _convert, "report": _report, "doctor": _doctor,
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Says which valid option is nearest, and that recipe options have no dashes."""

    def error(self, message: str) -> NoReturn:
        flag = next((word for word in message.split() if word.startswith("-")), "")
        if message.startswith("unrecognized arguments") and flag:
            name = flag.partition("=")[0]
            if "." in name:
                raise ConfigError(f"unknown option {flag!r}; options of the recipe are written without dashes: {flag.lstrip('-')}")
            raise ConfigError(f"unknown option {name!r}{nearest(name, [s for a in self._actions for s in a.option_strings])}")
        message = message.replace(", key=value", "")  # argparse names the optional rest too when the recipe is missing
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def _parser(command: str, description: str, epilog: str | None = None) -> _Parser:
    return _Parser(prog=f"miles {command}", description=description, epilog=epilog, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)


def _run_parser(command: str, description: str, schema: type[Section], *, resume: bool = True) -> _Parser:
    parser = _parser(command, description, _options_text(schema))
    parser.add_argument("recipe", metavar="RECIPE.toml", help="see scripts/recipes/ for examples")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="values that win over the recipe, for example trainer.lr=1e-4")
    if resume:
        parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in run.folder")
    return parser


def _options_text(schema: type[Section]) -> str:
    lines, section = ["options of the recipe:"], ""
    for key, kind, default, text in describe(schema):
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            lines.append("")
        shown = "required" if default == "(required)" else f"default {default!r}"
        lines.append(f"  {key}  ({kind}, {shown})\n      {text}")
    return "\n".join(lines)


def _parse(parser: _Parser, arguments: list[str]) -> argparse.Namespace:
    return parser.parse_intermixed_args(arguments)


def _is_users(error: ValueError) -> bool:
    """A ValueError that our own code raised is a message to the user; one from inside a library or a worker keeps its traceback."""
    if isinstance(error, ConfigError):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").partition(".")[0] in _OUR_PACKAGES


if __name__ == "__main__":
    sys.exit(main())
