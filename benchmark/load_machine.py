"""Whether somebody else uses the machine while something is timed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

import psutil

# Share of one core that others may take before a timing is not believed.
TOLERATED = 0.10


class OtherLoad:
    """CPU time of everybody but this process, its children and the servers given, since the last question."""

    def __init__(self, servers: Iterable[int] = ()) -> None:
        self._ours = [os.getpid(), *servers]
        self._wall, self._busy, self._own = self._read()

    def share(self) -> float:
        """Cores that others kept busy since the last call; stolen time counts."""
        before = self._wall, self._busy, self._own
        self._wall, self._busy, self._own = self._read()
        seconds = max(self._wall - before[0], 1e-6)
        return max((self._busy - before[1]) - (self._own - before[2]), 0.0) / seconds

    def _read(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # guest time is part of user time already
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return total / (os.cpu_count() or 1), total - idle, cpu_seconds(self._ours)


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that these processes and their descendants have used so far."""
    spent = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for member in [process, *process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    times = member.cpu_times()
                    spent += times.user + times.system
    return spent
