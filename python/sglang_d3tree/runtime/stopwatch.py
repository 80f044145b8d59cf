"""Where a round's time goes, stage by stage."""

from __future__ import annotations

import time

STAGES = ("prepare", "draft", "propose", "tree", "budget", "verify", "accept", "commit")


class Stopwatch:
    """Seconds per stage of one round, on the host's clock.

    On a CPU that is the work itself. On a device, where passes are only launched, it is the host's share, and device
    times would have to come from events on its stream.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Book the time since the last lap on `stage`."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the start to the last lap."""
        return self._last - self._began
