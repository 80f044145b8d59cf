"""What the operating system says about the processor."""

from __future__ import annotations

import platform
from pathlib import Path


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def processor_name() -> str:
    """The processor's model name, or what comes closest to it."""
    listed = _cpuinfo()
    if not listed:
        return platform.processor() or platform.machine()
    lines = listed.splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def has_feature(*names: str) -> bool:
    """Whether one of these instruction sets is listed."""
    listed = _cpuinfo()
    return any(name in listed for name in names)
