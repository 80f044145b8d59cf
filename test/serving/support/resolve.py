"""Resolve SGLang command lines in this process, one after the other; run as a script, JSON in and out.

stdin: a list of {"arguments": [...], "environment": {...}}. The last line of stdout: a list of {"error": str | None,
"kind": str | None, "fields": {...}, "options": {...} | None}, in the same order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

FIELDS = (
    "device",
    "attention_backend",
    "dtype",
    "max_total_tokens",
    "max_running_requests",
    "disable_overlap_schedule",
    "sleep_on_idle",
    "sampling_backend",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "speculative_draft_attention_backend",
)


def resolve_all(cases: list[dict[str, Any]], timeout: float = 300) -> list[dict[str, Any]]:
    """Resolve the cases in one fresh Python process."""
    answer = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    outcomes: list[dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return outcomes


def _resolve(case: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import prepare_server_args

    from sglang_d3tree.config import options_of

    os.environ.update(case.get("environment", {}))
    try:
        server_args = prepare_server_args([str(a) for a in case["arguments"]])
        server_args.resolve_once()
        view = resolving_view(server_args)
        fields = {name: getattr(view, name) for name in FIELDS}
        return {"error": None, "kind": None, "fields": fields, "options": vars(options_of(server_args))}
    except (Exception, SystemExit) as error:
        return {"error": str(error), "kind": type(error).__name__, "fields": {}, "options": None}
    finally:
        for name in case.get("environment", {}):
            os.environ.pop(name)


if __name__ == "__main__":
    from sglang.srt.plugins import load_plugins

    load_plugins()
    print("\n" + json.dumps([_resolve(case) for case in json.load(sys.stdin)]))
