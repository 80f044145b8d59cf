"""``d3tree calibrate``: a cost profile made at leisure, and its plot.

The measuring is the server's own (``runtime/calibration.py``), so a profile holds what the serving code costs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_d3tree.policy.cost import FILE_VARIABLE, SECONDS_VARIABLE, CostProfile


def calibrate(server_flags: Sequence[str], out: Path, seconds: float) -> CostProfile:
    """Start a server with these flags, let it measure into `out`, stop it, and draw the plot beside the file.

    Raises:
        ValueError: for flags without a target or a drafter.
        RuntimeError: when the server does not start; the message carries the end of its log.
    """
    from sglang_d3tree.demo.server import Server

    for flag in ("--model-path", "--speculative-draft-model-path"):
        if not any(given.split("=")[0] == flag for given in server_flags):
            raise ValueError(f"d3tree calibrate needs {flag}, as the server will have it.")
    flags = list(server_flags)
    if "--speculative-algorithm" not in flags:
        flags += ["--speculative-algorithm", "d3tree"]
    # A command that is told to end would otherwise leave its server behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    out = out.absolute()
    os.environ[FILE_VARIABLE] = str(out)
    os.environ[SECONDS_VARIABLE] = str(seconds)
    try:
        with Server(flags, name="calibration"):
            pass
    finally:
        del os.environ[FILE_VARIABLE], os.environ[SECONDS_VARIABLE]
    profile = CostProfile.load(out)
    plot = out.with_suffix(".png")
    draw(profile, plot)
    print(summary(profile))
    print(f"{out}\n{plot}")
    return profile


def summary(profile: CostProfile) -> str:
    """The profile in a few lines of milliseconds."""
    key = profile.key
    lines = [f"{key.target}, {key.dtype}, {key.device}, {key.threads} threads; rows in multiples of {profile.tile}"]
    for name, curve in (("verify", profile.verify), ("draft", profile.draft), ("propose", profile.propose)):
        points = "  ".join(f"{r}: {1e3 * s:.1f}" for r, s in zip(curve.rows, curve.seconds, strict=True))
        lines.append(f"{name:<8} ms at rows  {points}")
    for name, (fixed, per_request) in (("drafted", profile.round_host), ("plain", profile.plain_host)):
        lines.append(f"host, {name} round: {1e3 * fixed:.2f} ms and {1e3 * per_request:.3f} per request")
    lines.append(
        f"context: {1e6 * profile.per_key:.2f} us per token of a prefix, {1e6 * profile.per_row_key:.3f} us per "
        "row and token of its prefix"
    )
    return "\n".join(lines)


def draw(profile: CostProfile, path: Path) -> None:
    """Milliseconds against rows, both logarithmic, for the three measured curves.

    Raises:
        RuntimeError: where matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("the plot needs matplotlib: pip install 'sglang-d3tree[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, curve in (
        ("target, by rows", profile.verify),
        ("drafter, by rows", profile.draft),
        ("draft head and candidates, by drafted positions", profile.propose),
    ):
        axes.plot(curve.rows, [1e3 * s for s in curve.seconds], marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel="rows in one pass", ylabel="milliseconds")
    axes.set_title(f"{profile.key.device}, {profile.key.dtype}, {profile.key.threads} threads", fontsize=10)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
