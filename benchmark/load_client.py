"""A closed loop of streamed chat requests against one server, and what each request experienced."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, quantiles

import aiohttp
from load_workloads import Request


@dataclass(frozen=True)
class Answer:
    """Seconds from sending to the first piece and to the end, and the tokens in between."""

    first: float
    total: float
    tokens: int


@dataclass(frozen=True)
class Stretch:
    """One run of requests: wall seconds and every answer."""

    seconds: float
    answers: tuple[Answer, ...]

    @property
    def tokens_per_second(self) -> float:
        return sum(a.tokens for a in self.answers) / self.seconds

    def latencies(self) -> dict[str, float]:
        """Milliseconds: time to the first token, between tokens (mean over requests), and end to end."""
        totals = [1e3 * a.total for a in self.answers]
        between = [1e3 * (a.total - a.first) / (a.tokens - 1) for a in self.answers if a.tokens > 1]
        return {
            "ttft_mean": 1e3 * mean(a.first for a in self.answers),
            "inter_token_mean": mean(between) if between else 0.0,
            "e2e_p50": _percentile(totals, 50),
            "e2e_p99": _percentile(totals, 99),
        }


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def run_load(url: str, requests: Sequence[Request], concurrency: int, max_tokens: int) -> Stretch:
    """Send all requests, `concurrency` at a time. RuntimeError for an answer that is not 200."""
    return asyncio.run(_run(url, requests, concurrency, max_tokens))


async def _run(url: str, requests: Sequence[Request], concurrency: int, max_tokens: int) -> Stretch:
    waiting = list(reversed(requests))
    answers: list[Answer] = []
    timeout = aiohttp.ClientTimeout(total=1800)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            while waiting:
                answers.append(await _ask(session, url, waiting.pop().body(max_tokens)))

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        return Stretch(time.perf_counter() - began, tuple(answers))


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> Answer:
    began = time.perf_counter()
    first = 0.0
    last = b""
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                # Parsing every piece would take the server's CPU time; only the last one, with the usage, is read.
                if not first and b'"content":"' in line and b'"content":""' not in line:
                    first = time.perf_counter() - began
                last = line
    total = time.perf_counter() - began
    usage = json.loads(last.removeprefix(b"data: "))["usage"]
    return Answer(first or total, total, int(usage["completion_tokens"]))
