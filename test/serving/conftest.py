"""Servers shared by the serving tests. Starting one takes as long as many tests, so each lives for the session.

stock           the real target by SGLang alone: torch_native attention, no speculation, float32
d3tree          the same target with D3TREE, float32, prompts prefilled in chunks of 64 tokens
letters         the letters target (``support.models``) with D3TREE, 45 rows: fast, long accepted paths, sampling
letters_loaded  the same with made-up costs that bring every mode of the budget within a few requests
letters_plain   the letters target without speculation on our platform, seeds count
letters_seeded  the letters target with D3TREE, seeds count
headed          the letters target with D3TREE and a head beside its drafter, one kind after the other
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support import models
from support.servers import SERVE, Server

from sglang_d3tree.policy.cost import FILE_VARIABLE, SECONDS_VARIABLE, CostProfile, Curve, ProfileKey

# Trees as large as they may be, whatever this machine's costs say about models of a few thousand weights.
WHOLE_TREES = ("--speculative-d3tree-cost-profile", "none")
DETERMINISTIC = "--enable-deterministic-inference"
# Enough for the tests; the default would reserve gigabytes per server. Small enough to run out of in one test.
POOL = ("--max-total-tokens", 9216)


def speculative(target: Path, drafter: Path, *flags: Any) -> list[Any]:
    """Flags of a D3TREE server in float32."""
    return [
        *("--model-path", target, "--dtype", "float32", *POOL),
        *("--speculative-algorithm", "d3tree", "--speculative-draft-model-path", drafter, *flags),
    ]


def plain(target: Path, *flags: Any) -> list[Any]:
    """Flags of a server without speculation in float32."""
    return ["--model-path", target, "--dtype", "float32", *POOL, *flags]


def running(server: Server) -> Iterator[Server]:
    """Body of a server fixture: ready before the tests, gone after them whatever happened."""
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def stock() -> Iterator[Server]:
    yield from running(Server(*plain(models.real_target(), "--attention-backend", "torch_native")))


@pytest.fixture(scope="session")
def d3tree() -> Iterator[Server]:
    flags = speculative(models.real_target(), models.real_drafter(), "--chunked-prefill-size", 64)
    yield from running(Server(*flags, entry=SERVE))


@pytest.fixture(scope="session")
def letters() -> Iterator[Server]:
    target, drafter = models.letters_target(), models.letters_drafter()
    yield from running(Server(*speculative(target, drafter, "--speculative-d3tree-max-rows", 45, *WHOLE_TREES)))


@pytest.fixture(scope="session")
def letters_loaded(letters: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    key = ProfileKey(**letters.internal_state()["d3tree"]["cost_key"])
    path = tmp_path_factory.mktemp("costs") / "made-up.json"
    made_up_costs(key).save(path)
    target, drafter = models.letters_target(), models.letters_drafter()
    flags = ("--speculative-d3tree-max-rows", 45, "--speculative-d3tree-cost-profile", path)
    yield from running(Server(*speculative(target, drafter, *flags)))


def made_up_costs(key: ProfileKey) -> CostProfile:
    """One request has its rows for nothing, three share what costs more and more, eight cannot afford a draft."""
    return CostProfile(
        key=key,
        verify=Curve((1, 45, 46, 450), (1.0, 1.0, 1.2, 40.0)),
        draft=Curve((1, 450), (0.01, 0.01)),
        propose=Curve((1, 450), (0.01, 0.01)),
        round_host=(0.0, 0.3),
        plain_host=(0.0, 0.0),
        per_key=0.0,
        per_row_key=0.0,
        tile=4,
    )


@pytest.fixture(scope="session")
def letters_plain() -> Iterator[Server]:
    yield from running(Server(*plain(models.letters_target(), DETERMINISTIC)))


@pytest.fixture(scope="session")
def letters_seeded() -> Iterator[Server]:
    target, drafter = models.letters_target(), models.letters_drafter()
    yield from running(Server(*speculative(target, drafter, DETERMINISTIC, *WHOLE_TREES), entry=SERVE))


@pytest.fixture(scope="module", params=["linear", "path"])
def headed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    """The kind of head, and the letters target served with one of that kind that was never trained.

    Costs are measured at this start, whatever the cache holds: a vocabulary of 64 tokens, up to 64 requests.
    """
    folder = tmp_path_factory.mktemp("head")
    drafter = models.letters_drafter_with_head(folder / "drafter", request.param)
    flags = speculative(models.letters_target(), drafter, "--speculative-d3tree-max-rows", 24)
    measure = {FILE_VARIABLE: str(folder / "costs.json"), SECONDS_VARIABLE: "1"}
    for server in running(Server(*flags, environment=measure)):
        yield request.param, server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failing test shows the end of the log of every server it used."""
    report: Any = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Server):
                report.sections.append((f"log of server {name}", value.log_tail()))
    return report
