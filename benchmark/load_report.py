"""Ratios with intervals from interleaved runs, as a table and a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from scipy.stats import t as student

BASELINE = "plain"


@dataclass(frozen=True)
class Ratio:
    """Speed relative to the baseline of the same block: the geometric mean over blocks and its 95 % interval.

    low and high are None where one block was run: one run has no interval.
    """

    value: float
    low: float | None
    high: float | None

    @property
    def half_width(self) -> float:
        """Relative half width of the interval, infinite without one."""
        if self.low is None or self.high is None:
            return math.inf
        return (self.high - self.low) / 2 / self.value

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f} (one run)"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(speeds: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Student's interval on the logarithms of the blocks' ratios; both sequences are in block order."""
    logs = [math.log(a / b) for a, b in zip(speeds, baseline, strict=True)]
    middle = mean(logs)
    if len(logs) < 2:
        return Ratio(math.exp(middle), None, None)
    width = float(student.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(middle), math.exp(middle - width), math.exp(middle + width))


def setting_ratios(blocks: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Ratio]:
    """Every method's ratio in one setting, from its blocks {method: run}."""
    if not blocks or BASELINE not in blocks[0]:
        return {}
    plain = [block[BASELINE]["tokens_per_second"] for block in blocks]
    return {name: ratio([block[name]["tokens_per_second"] for block in blocks], plain) for name in blocks[0]}


def table(settings: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, one line per setting and method."""
    lines = [
        "| kind | requests | method | tokens/s | x plain [95 %] | accept length | rows/round | TTFT ms "
        "| between tokens ms | e2e p50 / p99 ms | plain/light/heavy/saturated rounds | predicted/measured | budget |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setting in settings:
        ratios = setting_ratios(setting["blocks"])
        for name in setting["blocks"][0]:
            runs = [block[name] for block in setting["blocks"]]
            lines.append("| " + " | ".join(_cells(setting, name, runs, ratios.get(name))) + " |")
    return "\n".join(lines)


def _cells(
    setting: Mapping[str, Any], name: str, runs: Sequence[Mapping[str, Any]], found: Ratio | None
) -> list[str]:
    def average(key: str) -> float:
        return mean(run["latencies"][key] for run in runs)

    rounds = [run["rounds"] for run in runs if run.get("rounds")]

    def of_rounds(key: str, text: str) -> str:
        values = [r[key] for r in rounds if key in r]
        return text.format(mean(values)) if values else ""

    modes = ""
    if rounds:
        shares = [sum(r["modes"][m] for r in rounds) for m in ("plain", "light", "heavy", "saturated")]
        modes = " / ".join(str(int(s)) for s in shares)
    return [
        setting["kind"],
        str(setting["requests"]),
        name,
        f"{mean(run['tokens_per_second'] for run in runs):.1f}",
        "" if found is None else str(found),
        of_rounds("accept_length", "{:.2f}"),
        of_rounds("rows_per_round", "{:.1f}"),
        f"{average('ttft_mean'):.0f}",
        f"{average('inter_token_mean'):.1f}",
        f"{average('e2e_p50'):.0f} / {average('e2e_p99'):.0f}",
        modes,
        of_rounds("predicted_over_measured", "{:.2f}"),
        of_rounds("budget_share", "{:.2%}"),
    ]


def plot(settings: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Ratio against requests, one panel per kind, intervals as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(setting["kind"] for setting in settings))
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(4.2 * len(kinds), 3.8), squeeze=False, layout="constrained")
    for axis, kind in zip(axes[0], kinds, strict=True):
        of_kind = [(s["requests"], setting_ratios(s["blocks"])) for s in settings if s["kind"] == kind]
        for name in of_kind[0][1]:
            points = [(requests, ratios[name]) for requests, ratios in of_kind if name in ratios]
            values = [r.value for _, r in points]
            below = [r.value - (r.low or r.value) for _, r in points]
            above = [(r.high or r.value) - r.value for _, r in points]
            axis.errorbar([x for x, _ in points], values, yerr=(below, above), marker="o", capsize=3, label=name)
        axis.set(title=kind, xscale="log", xlabel="concurrent requests", ylabel="speed over plain decoding")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.grid(True, alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
