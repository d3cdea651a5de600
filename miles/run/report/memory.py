"""A memory plan as a picture: moments from left to right, what is there stacked by kind, the budget as a line."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from miles.core.planning.residency import Residency

_MIB = 2**20


def draw(residency: Residency, title: str) -> Figure:
    """Bars in MiB, one for each moment."""
    figure = Figure(figsize=(max(6.0, 0.45 * len(residency.moments) + 3), 4.2), layout="constrained")
    axes = figure.add_subplot()
    places, below = np.arange(len(residency.moments)), np.zeros(len(residency.moments))
    for kind in dict.fromkeys(r.kind for r in residency.residents):
        sizes = np.array(residency.of_kind(kind)) / _MIB
        axes.bar(places, sizes, bottom=below, width=0.9, label=kind)
        below += sizes
    if residency.budget is not None and residency.budget / _MIB < 4 * below.max():
        axes.axhline(residency.budget / _MIB, color="black", linestyle="--", linewidth=1, label="budget")
    axes.set_xticks(places, residency.moments, rotation=45, ha="right", fontsize=7)
    axes.set_ylabel("MiB of one rank")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=7)
    return figure
