"""SGLang's process split stays: tokenizer manager, scheduler and detokenizer are processes joined by ZMQ."""

from __future__ import annotations

import psutil
import pytest
from support.servers import Server

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def processes(letters: Server) -> dict[str, psutil.Process]:
    """The three processes by what they do."""
    main = psutil.Process(letters.process.pid)
    named = {"tokenizer manager": main}
    for child in main.children(recursive=True):
        title = " ".join(child.cmdline())
        for role in ("scheduler", "detokenizer"):
            if f"sglang::{role}" in title:
                assert role not in named, f"two processes call themselves {role}"
                named[role] = child
    return named


def test_three_processes(processes: dict[str, psutil.Process]) -> None:
    assert set(processes) == {"tokenizer manager", "scheduler", "detokenizer"}
    assert len({process.pid for process in processes.values()}) == 3


def test_each_listens_at_its_own_zmq_endpoint(processes: dict[str, psutil.Process]) -> None:
    """ZMQ's ipc endpoints are bound Unix sockets; ports count as well."""
    endpoints: dict[str, set[str]] = {}
    for role, process in processes.items():
        unix = {c.laddr for c in process.net_connections("unix") if c.laddr}
        tcp = {f"{c.laddr.ip}:{c.laddr.port}" for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        endpoints[role] = unix | tcp
        assert endpoints[role], f"the {role} listens nowhere"
        assert any("libzmq" in mapping.path for mapping in process.memory_maps()), f"the {role} has not loaded ZMQ"
    assert endpoints["scheduler"] != endpoints["detokenizer"] != endpoints["tokenizer manager"]


def test_model_and_drafter_live_in_the_scheduler(processes: dict[str, psutil.Process], letters: Server) -> None:
    """A round costs the scheduler's time, and the web server's process does none of the model's work."""
    before = {role: sum(process.cpu_times()[:2]) for role, process in processes.items()}
    letters.generate(["et"] * 8, max_new_tokens=300, ignore_eos=True)
    spent = {role: sum(process.cpu_times()[:2]) - before[role] for role, process in processes.items()}
    assert spent["scheduler"] > 3 * max(spent["detokenizer"], spent["tokenizer manager"]), spent
    assert "D3TREE: policy d3tree" in letters.log()
