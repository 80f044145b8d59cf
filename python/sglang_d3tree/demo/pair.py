"""Where the demo's verifier and drafter are, built on first use."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sglang_d3tree.demo.target import ASSETS, build_target

DRAFTER = ASSETS / "drafter"


@dataclass(frozen=True)
class DemoPair:
    """Checkpoint directories of a target and the drafter trained for it."""

    model_path: Path
    draft_model_path: Path


def cache_directory() -> Path:
    """Where built checkpoints are kept: ``SGLANG_D3TREE_CACHE``, or the user's cache directory."""
    given = os.environ.get("SGLANG_D3TREE_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sglang-d3tree"


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
