"""The load benchmark's own judgement: ratios with intervals, a busy machine noticed, the same requests every time."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

from load_client import Answer, Stretch
from load_machine import OtherLoad, cpu_seconds
from load_report import ratio, setting_ratios, table
from load_workloads import KINDS, requests_of

from sglang_d3tree.policy.planner import MODES
from sglang_d3tree.runtime.metrics import averages
from sglang_d3tree.runtime.stopwatch import STAGES


def test_a_ratio_is_the_geometric_mean_with_students_interval():
    found = ratio([20.0, 22.0, 24.0], [10.0, 10.0, 10.0])
    assert found.value == pytest.approx((2.0 * 2.2 * 2.4) ** (1 / 3))
    # 4.303 is Student's 97.5 % point with two degrees of freedom.
    logs = [math.log(r) for r in (2.0, 2.2, 2.4)]
    spread = math.sqrt(sum((x - sum(logs) / 3) ** 2 for x in logs) / 2)
    assert math.log(found.high / found.value) == pytest.approx(4.303 * spread / math.sqrt(3), rel=1e-3)
    assert found.low * found.high == pytest.approx(found.value**2)


def test_slow_blocks_that_are_slow_for_everybody_do_not_widen_the_interval():
    found = ratio([20.0, 2.0, 9.0], [10.0, 1.0, 4.5])
    assert found.value == pytest.approx(2.0) and found.half_width == pytest.approx(0.0, abs=1e-9)


def test_one_run_has_no_interval_and_says_so():
    found = ratio([3.0], [2.0])
    assert found.low is None and math.isinf(found.half_width) and "one run" in str(found)


def a_run(speed: float) -> dict:
    stretch = Stretch(10.0, (Answer(0.1, 2.0, int(5 * speed)), Answer(0.3, 4.0, int(5 * speed))))
    return {"tokens_per_second": stretch.tokens_per_second, "latencies": stretch.latencies(), "rounds": None}


def test_the_table_has_a_line_for_every_method_of_every_setting():
    blocks = [{"plain": a_run(10), "d3tree": a_run(20)}, {"plain": a_run(20), "d3tree": a_run(40)}]
    settings = [{"kind": "text", "requests": 4, "blocks": blocks}]
    lines = table(settings).splitlines()
    assert len(lines) == 4 and "| text | 4 | d3tree | 30.0 | 2.00 [2.00, 2.00] |" in lines[3]
    assert setting_ratios([{"chain": a_run(1)}]) == {}


def test_latencies_are_milliseconds():
    found = a_run(10)["latencies"]
    assert found["ttft_mean"] == pytest.approx(200) and found["e2e_p50"] == pytest.approx(3000)
    assert found["inter_token_mean"] == pytest.approx((1900 / 49 + 3700 / 49) / 2)


def test_a_servers_work_is_ours_and_its_childrens_too():
    burn = "x = 0\nwhile True: x += 1"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], start_new_session=True) as server:
        time.sleep(3.0)
        alone = psutil.Process(server.pid).cpu_times().user
        with_child = cpu_seconds([server.pid])
        os.killpg(server.pid, signal.SIGKILL)
    assert with_child > alone + 0.2


def test_what_others_take_is_what_is_busy_less_our_own(monkeypatch):
    readings = iter([(0.0, 0.0, 0.0), (10.0, 14.0, 9.0), (20.0, 15.0, 10.5)])
    monkeypatch.setattr(OtherLoad, "_read", lambda self: next(readings))
    others = OtherLoad()
    assert others.share() == pytest.approx(0.5)
    assert others.share() == 0.0  # rounding of the clocks is nobody's work


@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_different_and_the_same_every_time(kind):
    first = requests_of(kind, 12)
    assert len({(r.text, r.image) for r in first}) == 12
    assert requests_of(kind, 4, first=8) == first[8:]
    assert all((r.image is not None) == kind.startswith("image") for r in first)
    assert first[0].body(5)["max_tokens"] == 5


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="image-long"):
        requests_of("poems", 1)


def test_differences_of_counters_describe_the_time_between():
    names = [
        "rounds", "request_rounds", "capacity", "drafted", "seconds", "predicted", "seconds_predicted", "error", "rows",
        "tokens", "tokens_predicted", *(f"mode_{m}" for m in MODES), *(f"stage_{s}" for s in STAGES),
    ]  # fmt: skip
    totals = dict.fromkeys(names, 0.0)
    assert averages(totals) == {"rounds": 0}
    totals |= {"rounds": 4, "request_rounds": 8, "tokens": 20, "rows": 40, "capacity": 44, "seconds": 2.0}
    totals |= {"stage_budget": 0.02, "mode_heavy": 4, "drafted": 28}
    found = averages(totals)
    assert found["accept_length"] == 2.5 and found["rows_per_round"] == 10 and found["budget_share"] == 0.01
    assert found["modes"] == {"plain": 0, "light": 0, "heavy": 4, "saturated": 0} and "prediction_error" not in found
