"""Speed under load: stock SGLang, plain decoding on our backend, and every policy, interleaved on running servers.

    python benchmark/bench_load.py --out results/load --loads 1 4 16 64 --kinds text code image-short image-long

One setting is a workload kind and a number of concurrent requests. Per setting, blocks are run until every method's
95 % interval of its speed over plain decoding is within --interval of it, or --blocks are done; a block runs every
method once over the same requests, in random order. Answers end where the model ends them. The command refuses to
start while others use the machine, and repeats a block during which they did. It writes OUT.json (everything), OUT.md
(a table, with the command) and OUT.png; OUT.json is written after every block, and a run with the same OUT and
--resume goes on from there.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import requests
import torch
from load_client import run_load
from load_machine import TOLERATED, OtherLoad
from load_report import plot, setting_ratios, table
from load_workloads import KINDS, requests_of

from sglang_d3tree.demo.pair import prepare_pair
from sglang_d3tree.demo.server import Server
from sglang_d3tree.runtime.metrics import averages


@dataclass(frozen=True)
class Method:
    """A server to ask, and the options to set on it first."""

    server: str
    options: dict[str, Any] = field(default_factory=dict)


METHODS = {
    "stock": Method("stock"),
    "plain": Method("plain"),
    "chain": Method("d3tree", {"policy": "chain", "tree_rows": 0}),
    "ddtree-16": Method("d3tree", {"policy": "ddtree", "tree_rows": 16}),
    "ddtree-32": Method("d3tree", {"policy": "ddtree", "tree_rows": 32}),
    "ddtree-64": Method("d3tree", {"policy": "ddtree", "tree_rows": 64}),
    "caddtree": Method("d3tree", {"policy": "caddtree", "tree_rows": 32}),
    "d3tree": Method("d3tree", {"policy": "d3tree", "tree_rows": 32}),
    "d3tree-fixed-horizon": Method("d3tree", {"policy": "d3tree", "tree_rows": 32, "adaptive_horizon": False}),
}
DEFAULT_METHODS = ("stock", "plain", "chain", "ddtree-16", "ddtree-32", "caddtree", "d3tree")


def server_flags(name: str, args: argparse.Namespace) -> list[str]:
    """Command line of one of the three servers."""
    most_rows = max([m.options.get("tree_rows", 0) for n, m in METHODS.items() if n in args.methods] + [32])
    flags = {
        "stock": ["--attention-backend", "torch_native"],
        "plain": [],
        "d3tree": [
            *("--speculative-algorithm", "d3tree", "--speculative-draft-model-path", str(args.drafter)),
            *("--speculative-d3tree-max-rows", str(most_rows), *shlex.split(args.d3tree_flags)),
        ],
    }[name]
    return ["--model-path", str(args.target), "--max-total-tokens", str(args.kv_tokens), *flags]


def number_of_requests(load: int, kind: str) -> int:
    """Enough for the start and the end of a run, where fewer are in flight, to matter little."""
    return max(2 * load, 16 if kind == "image-short" else 6)


class Bench:
    """Running servers, and the results so far."""

    def __init__(self, args: argparse.Namespace, servers: dict[str, Server], settings: list[dict[str, Any]]) -> None:
        self._args = args
        self._servers = servers
        self._rng = random.Random(args.seed)
        self._others = OtherLoad(server.pid for server in servers.values())
        self.settings = settings

    def run(self) -> None:
        """Every setting, until its intervals are narrow or its blocks done."""
        for kind in self._args.kinds:
            for load in self._args.loads:
                setting = self._setting(kind, load)
                while not self._is_settled(setting):
                    setting["blocks"].append(self._quiet_block(kind, load))
                    self._save()
                ratios = setting_ratios(setting["blocks"])
                print(f"{kind} x {load}: " + ", ".join(f"{n} {r}" for n, r in ratios.items()), flush=True)

    def _setting(self, kind: str, load: int) -> dict[str, Any]:
        for setting in self.settings:
            if (setting["kind"], setting["requests"]) == (kind, load):
                return setting
        self.settings.append({"kind": kind, "requests": load, "blocks": []})
        return self.settings[-1]

    def _is_settled(self, setting: dict[str, Any]) -> bool:
        done = len(setting["blocks"])
        if done < min(2, self._args.blocks):
            return False
        widths = [r.half_width for n, r in setting_ratios(setting["blocks"]).items() if n != "plain"]
        return done >= self._args.blocks or (bool(widths) and max(widths) <= self._args.interval)

    def _quiet_block(self, kind: str, load: int) -> dict[str, Any]:
        """A block that nobody else disturbed; the last of three tries counts, with what disturbed it."""
        for _ in range(3):
            block = self._block(kind, load)
            if max(run["others"] for run in block.values()) <= TOLERATED:
                return block
            print(f"{kind} x {load}: others used the machine, once more", flush=True)
        return block

    def _block(self, kind: str, load: int) -> dict[str, Any]:
        names = list(self._args.methods)
        self._rng.shuffle(names)
        runs = {name: self._run(METHODS[name], kind, load) for name in names}
        return {name: runs[name] for name in self._args.methods}

    def _run(self, method: Method, kind: str, load: int) -> dict[str, Any]:
        server = self._servers[method.server]
        if method.options:
            options = {"adaptive_horizon": True, **method.options}
            _post(server, "/d3tree/options", options)
        # Nobody may profit from prefixes that an earlier run left.
        _post(server, "/flush_cache", {})
        before = _totals(server) if method.options else {}
        self._others.share()
        stretch = run_load(server.url, requests_of(kind, number_of_requests(load, kind)), load, self._args.max_tokens)
        others = self._others.share()
        after = _totals(server) if method.options else {}
        return {
            "tokens_per_second": stretch.tokens_per_second,
            "seconds": stretch.seconds,
            "tokens": sum(a.tokens for a in stretch.answers),
            "latencies": stretch.latencies(),
            "others": others,
            "rounds": averages({key: after[key] - before[key] for key in after}) if after else None,
        }

    def _save(self) -> None:
        out: Path = self._args.out
        out.parent.mkdir(parents=True, exist_ok=True)
        command = shlex.join(["python", "benchmark/bench_load.py", *sys.argv[1:]])
        about = {
            "command": command,
            "machine": f"{platform.machine()}, {platform.system()}",
            "threads": torch.get_num_threads(),
            "versions": {name: version(name) for name in ("sglang", "torch", "sglang-d3tree")},
            "interval": "95 %, Student, on logarithms of per-block ratios",
        }
        out.with_suffix(".json").write_text(json.dumps({**about, "settings": self.settings}, indent=1) + "\n")
        finished = [setting for setting in self.settings if setting["blocks"]]
        text = f"# Speed under load\n\n`{command}`\n\n{table(finished)}\n"
        out.with_suffix(".md").write_text(text)
        if "plain" in self._args.methods:
            plot(finished, out.with_suffix(".png"))


def _post(server: Server, path: str, body: dict[str, Any]) -> None:
    for _ in range(50):
        response = requests.post(server.url + path, json=body, timeout=60)
        if response.status_code == 200:
            return
        time.sleep(0.2)  # a server that has just answered may not be idle yet
    raise RuntimeError(f"{server.name} refused {path} {body}: {response.status_code} {response.text[:500]}")


def _totals(server: Server) -> dict[str, float]:
    state = requests.get(f"{server.url}/server_info", timeout=60).json()["internal_states"][0]
    totals: dict[str, float] = state["d3tree"]["totals"]
    return totals


def refuse_busy_machine() -> None:
    """SystemExit with a sentence while others use the CPU."""
    others = OtherLoad()
    time.sleep(2.0)
    share = others.share()
    if share > TOLERATED:
        raise SystemExit(
            f"Others keep {share:.2f} cores busy; timings would mean nothing. Wait, or see --anyway for a rehearsal."
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("load"), help="results go to OUT.json, OUT.md and OUT.png")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--loads", nargs="+", type=int, default=[1, 4, 16, 64], help="concurrent requests")
    parser.add_argument("--methods", nargs="+", default=list(DEFAULT_METHODS), choices=list(METHODS))
    parser.add_argument("--blocks", type=int, default=8, help="most blocks of a setting")
    parser.add_argument("--interval", type=float, default=0.05, help="half width of the ratio's interval to stop at")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--target", type=Path, help="target checkpoint (default: the demo's)")
    parser.add_argument("--drafter", type=Path, help="drafter checkpoint (default: the demo's)")
    parser.add_argument("--kv-tokens", type=int, default=24576, help="KV cache of each server, in tokens")
    parser.add_argument("--d3tree-flags", default="", help="more flags for the D3TREE server, in one string")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from OUT.json")
    parser.add_argument("--anyway", action="store_true", help="run on a busy machine; the results say so")
    args = parser.parse_args()
    if args.target is None or args.drafter is None:
        pair = prepare_pair()
        args.target = args.target or pair.model_path
        args.drafter = args.drafter or pair.draft_model_path
    return args


def main() -> int:
    args = arguments()
    if not args.anyway:
        refuse_busy_machine()
    saved = args.out.with_suffix(".json")
    settings = json.loads(saved.read_text())["settings"] if args.resume and saved.exists() else []
    with ExitStack() as running:
        servers = {}
        for name in dict.fromkeys(METHODS[method].server for method in args.methods):
            servers[name] = running.enter_context(Server(server_flags(name, args), name=name))
        Bench(args, servers, settings).run()
    print(args.out.with_suffix(".md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
