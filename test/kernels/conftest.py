"""Kernel tests draw their inputs from the generators of the unit tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
