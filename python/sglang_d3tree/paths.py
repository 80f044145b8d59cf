"""Where files that are built or measured once are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """``SGLANG_D3TREE_CACHE``, or ``sglang-d3tree`` in the user's cache directory (``XDG_CACHE_HOME``)."""
    given = os.environ.get("SGLANG_D3TREE_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-d3tree"
