"""Where the demo's verifier and drafter are, built on first use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_d3tree.demo.target import ASSETS, build_target
from sglang_d3tree.paths import cache_directory

DRAFTER = ASSETS / "drafter"


@dataclass(frozen=True)
class DemoPair:
    """Checkpoint directories of a target and the drafter trained for it."""

    model_path: Path
    draft_model_path: Path


def prepare_pair() -> DemoPair:
    """Build the verifier (half a minute, once) next to the drafter that ships with this package.

    Raises:
        FileNotFoundError: when the drafter's weights are not in the installation.
    """
    if not (DRAFTER / "model.safetensors").exists():
        raise FileNotFoundError(
            f"The demo drafter is missing from {DRAFTER.relative_to(ASSETS.parents[1])}; train one with "
            "'d3tree train drafter' or reinstall sglang-d3tree."
        )
    return DemoPair(build_target(cache_directory() / "target"), DRAFTER)
