"""`miles report RUN`: one self-contained HTML page, and the same curves as a PNG."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from miles.config import ConfigError
from miles.run.report.curves import Curves, draw, to_svg, write_png
from miles.tracking.jsonl import read_metrics, read_records
from miles.tracking.names import METRICS
from miles.tracking.tracker import CONFIG_FILE, METRICS_FILE, TABLES_FILE

PAGE_FILE, PICTURE_FILE = "report.html", "curves.png"
_TABLES = 6  # the latest sample tables on the page
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; color: #1c1c1c; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 13px; } th, td { border-bottom: 1px solid #ddd; padding: 3px 10px 3px 0; text-align: left; vertical-align: top; }
td { white-space: pre-wrap; overflow-wrap: anywhere; max-width: 40rem; font-family: ui-monospace, monospace; } .dim { color: #777; }
"""


def write(run: str | Path) -> tuple[Path, Path]:
    """Write RUN/report.html and RUN/curves.png from what the run has recorded so far, and return their paths.

    Raises:
        ConfigError: the folder is no run folder, or nothing has been recorded.
    """
    folder = Path(run)
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        raise ConfigError(f"{str(run)!r} is no run folder: it has no {METRICS_FILE}")
    curves = read_metrics(metrics)
    figure = draw(curves, folder.name)
    picture = write_png(figure, folder / PICTURE_FILE)
    page = folder / PAGE_FILE
    page.write_text("".join(_page(folder, curves, to_svg(figure))), encoding="utf-8")
    return page, picture


def _page(folder: Path, curves: Curves, svg: str) -> Iterator[str]:
    name = html.escape(folder.name)
    yield f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style></head><body>\n'
    last = max(steps[-1] for steps, _ in curves.values())
    yield f'<h1>{name}</h1>\n<p class="dim">{last} steps recorded</p>\n{svg}\n'
    yield "<h2>Last values</h2>\n"
    yield from _table(["metric", "step", "value", "meaning"], [[n, s[-1], f"{v[-1]:.6g}", METRICS.get(n, "")] for n, (s, v) in sorted(curves.items())])
    tables = list(read_records(folder / TABLES_FILE)) if (folder / TABLES_FILE).is_file() else []
    for record in reversed(tables[-_TABLES:]):
        yield f"<h2>{html.escape(record['table'])}, step {record['step']}</h2>\n"
        yield from _table(record["columns"], record["rows"])
    yield "<h2>Configuration</h2>\n"
    yield from _table(["option", "value"], _leaves(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")), ""))
    yield "</body></html>\n"


def _table(columns: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Every cell is escaped: a sample may hold HTML."""
    yield "<table><tr>" + "".join(f"<th>{html.escape(str(c))}</th>" for c in columns) + "</tr>\n"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>\n"
    yield "</table>\n"


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node
