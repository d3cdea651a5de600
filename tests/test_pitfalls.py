"""The page of pitfalls names tests; each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/pitfalls.md").read_text(encoding="utf-8")))
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "tests").rglob("test_*.py"))
    there = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert len(named) > 100
    assert named <= there, f"docs/pitfalls.md names tests that are not there: {sorted(named - there)}"
