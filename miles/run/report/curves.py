"""The curves of a run as one matplotlib figure: a PNG to show, an SVG for the page."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

Curves = dict[str, tuple[list[int], list[float]]]

# Panel title -> metrics drawn in it. A panel appears when the run has one of them.
PANELS: dict[str, tuple[str, ...]] = {
    "reward of the trained batch": ("reward/mean", "reward/std"),
    "evaluation": ("eval/pass_at_1", "eval/pass_at_4", "eval/pass_at_8", "eval/pass_at_16", "eval/greedy"),
    "negative log-likelihood, nats per token": ("loss/nll",),
    "share of pairs told apart": ("preference/accuracy", "eval/preference_accuracy"),
    "rewards of answers": ("preference/margin", "eval/preference_margin", "preference/chosen_reward", "preference/rejected_reward"),
    "entropy, nats per token": ("policy/entropy",),
    "KL to the reference, nats per token": ("policy/kl",),
    "divergence from the teacher, nats per token": ("distill/kl", "eval/distill_kl"),
    "critic's loss": ("value/loss",),
    "share of the returns that the critic explains": ("value/explained_variance",),
    "share of ratios clipped": ("policy/clip_fraction",),
    "gradient norm before clipping": ("optimizer/grad_norm",),
    "learning rate": ("optimizer/lr",),
    "response length, tokens": ("length/mean", "length/max"),
    "engine against trainer, |log-prob difference|": ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max"),
    "staleness, weight versions": ("staleness/mean", "staleness/max"),
    "seconds of a step": ("seconds/step", "seconds/rollout_wait", "seconds/train", "seconds/weight_sync"),
    "tokens per second": ("throughput/generated_tokens_per_s", "throughput/trained_tokens_per_s"),
}
_COLUMNS = 3


def draw(curves: Curves, title: str) -> Figure:
    """One panel per group of metrics that the run has. Steps are on the x axis.

    Raises:
        ValueError: the run has none of them.
    """
    panels = [(name, [m for m in metrics if m in curves]) for name, metrics in PANELS.items()]
    panels = [(name, metrics) for name, metrics in panels if metrics]
    if not panels:
        raise ValueError(f"{title}: no metric has been recorded yet; a report needs at least one finished step")
    rows = -(-len(panels) // _COLUMNS)
    figure = Figure(figsize=(4.6 * _COLUMNS, 2.9 * rows), layout="constrained")
    figure.suptitle(title, parse_math=False)
    figure.supxlabel("step", fontsize=9)
    for place, (name, metrics) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, _COLUMNS, place)
        for metric in metrics:
            steps, values = curves[metric]
            axes.plot(steps, values, marker="o" if len(steps) <= 12 else None, markersize=3, linewidth=1.4, label=metric.partition("/")[2])
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
        if len(metrics) > 1:
            axes.legend(fontsize=7)
    return figure


def write_png(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=110, format="png")
    return path


def to_svg(figure: Figure) -> str:
    """The `<svg>` element alone, for use inside a page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "miles"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
