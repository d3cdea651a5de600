"""A driver of its own process for tests that kill it: runs the recipe whose overrides the JSON file lists."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from miles.core.environment import set_defaults

set_defaults()

from miles.config import load  # noqa: E402
from miles.run import rl  # noqa: E402
from miles.run.recipe import RLRecipe  # noqa: E402

if __name__ == "__main__":
    rl.run(load(RLRecipe, None, json.loads(Path(sys.argv[1]).read_text())))
