"""The first step of offline distillation: a teacher's answers as conversations to imitate.

    python scripts/teacher_answers.py TEACHER_RECIPE.toml answers.jsonl [key=value ...]
    miles sft STUDENT_RECIPE.toml 'data.paths=["answers.jsonl"]' data.messages_column=messages

The recipe is one of `miles evaluate`: its model is the teacher, which answers each prompt of evaluate.data evaluate.samples_per_prompt times.
Answers that were cut off are left out: they would teach to stop in the middle.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from miles.core.environment import set_defaults

set_defaults()  # before anything imports torch

from miles.config import ConfigError, load  # noqa: E402
from miles.core.model.load import longest_sequence, tokenizer_of  # noqa: E402
from miles.data import rows  # noqa: E402
from miles.data.config import PromptDataConfig  # noqa: E402
from miles.data.prompts import PromptDataset  # noqa: E402
from miles.data.types import Group, Status  # noqa: E402
from miles.run import evaluate  # noqa: E402
from miles.run.recipe import EvaluateRecipe  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description="Let a model answer prompts, and write the answers as conversations for `miles sft`.")
    parser.add_argument("recipe", help="a recipe of `miles evaluate`")
    parser.add_argument("output", help="the JSONL file to write; it must be new")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    options = parser.parse_args()
    if Path(options.output).exists():
        raise ConfigError(f"{options.output!r} exists already: name a new file")
    recipe = load(EvaluateRecipe, options.recipe, options.overrides)
    tokenizer = tokenizer_of(recipe.config.model)
    prompts = prompts_of(recipe.config, tokenizer)
    groups = evaluate.run(recipe).groups
    lines = [json.dumps(row, ensure_ascii=False) for row in conversations(recipe.config.evaluate.data, prompts, groups, tokenizer)]
    Path(options.output).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{options.output}: {len(lines)} answers; {sum(len(g.samples) for g in groups) - len(lines)} were cut off and left out")
    return 0


def prompts_of(config: EvaluateRecipe, tokenizer: Any) -> list[Any]:
    """The prompts as they stand in the files, by `Prompt.prompt_id`.

    Raises:
        ConfigError: some are too long to be asked, so that ids would not be rows.
    """
    data = config.evaluate.data
    report = PromptDataset.load(data, tokenizer, longest_sequence(config.model) - config.evaluate.max_new_tokens).report
    if report.too_long:
        raise ConfigError(f"evaluate.data: {report.too_long} prompts are longer than {report.max_tokens} tokens: remove them, or lower max_new_tokens")
    return rows.read(data.paths).column(data.prompt_column, "evaluate.data.prompt_column")


def conversations(data: PromptDataConfig, prompts: Sequence[Any], groups: Sequence[Group], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """One row with `messages` for each complete answer."""
    system = [{"role": "system", "content": data.system}] if data.system is not None else []
    for group in groups:
        prompt = prompts[group.prompt.prompt_id]
        before = prompt if isinstance(prompt, list) else [*system, {"role": "user", "content": prompt}]
        for sample in group.samples:
            if sample.status is Status.COMPLETED:
                answer = tokenizer.decode(sample.response_tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
                yield {"messages": [*before, {"role": "assistant", "content": answer}]}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        print(f"teacher_answers: {error}", file=sys.stderr)
        sys.exit(2)
