"""Accept lengths with intervals, as a table and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_d3tree.demo.evaluate import tokens_per_round
from sglang_d3tree.train.replay import Replayed, total

BOOTSTRAP = 1000


@dataclass(frozen=True)
class AcceptLength:
    """Tokens per round of one method, with a 95 % bootstrap interval over the answers.

    rows: asked for, mean per round; verified: what came of it. limit: the method's knob that gave it (threshold, slope
    of the costs, rows).
    """

    kind: str
    method: str
    rows: int
    verified: float
    limit: float
    answers: int
    rounds: int
    mean: float
    low: float
    high: float


def accept_length(kind: str, method: str, rows: int, limit: float, replays: Sequence[Replayed]) -> AcceptLength:
    """The mean and interval of ``tokens_per_round``, with the rows that were spent."""
    whole = total(replays)
    interval = tokens_per_round([(r.tokens, r.rounds) for r in replays], BOOTSTRAP)
    return AcceptLength(
        kind, method, rows, whole.rows / whole.rounds, limit, len(replays), whole.rounds, *interval
    )  # fmt: skip


def table(results: Sequence[AcceptLength]) -> str:
    """Markdown: one table per kind, a line per method, a column per number of rows."""
    lines = []
    for kind in dict.fromkeys(r.kind for r in results):
        own = [r for r in results if r.kind == kind]
        columns = sorted({r.rows for r in own})
        lines += ["", f"**{kind}** ({own[0].answers} answers)", ""]
        lines.append("| mean rows per round | " + " | ".join(map(str, columns)) + " |")
        lines.append("|---" * (len(columns) + 1) + "|")
        for method in dict.fromkeys(r.method for r in own):
            cells = {r.rows: r for r in own if r.method == method}
            shown = [_cell(cells[c]) if c in cells else "" for c in columns]
            lines.append(f"| {method} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _cell(r: AcceptLength) -> str:
    # A method that has fewer rows to offer than it may verify says how many it used.
    used = "" if r.verified > 0.9 * r.rows else f", {r.verified:.1f} rows"
    return f"{r.mean:.2f} [{r.low:.2f}, {r.high:.2f}]{used}"


def plot(results: Sequence[AcceptLength], path: Path) -> None:
    """Accept length against verified rows, one panel per kind, intervals as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(r.kind for r in results))
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(3.9 * len(kinds), 3.8), squeeze=False, layout="constrained")
    for axis, kind in zip(axes[0], kinds, strict=True):
        for method in dict.fromkeys(r.method for r in results):
            points = sorted((r for r in results if r.kind == kind and r.method == method), key=lambda r: r.verified)
            bars = [r.mean - r.low for r in points], [r.high - r.mean for r in points]
            axis.errorbar([r.verified for r in points], [r.mean for r in points], yerr=bars, marker="o", capsize=3,
                          markersize=3, label=method)  # fmt: skip
        axis.set(title=kind, xscale="log", xlabel="mean rows per round", ylabel="tokens per round")
        axis.grid(True, alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def as_json(results: Sequence[AcceptLength]) -> list[dict[str, Any]]:
    """For json.dumps."""
    return [asdict(r) for r in results]
