"""The only file that touches SGLang's registries and hooks.

SGLang calls ``register`` in every process it starts (entry point ``sglang.srt.plugins``) and only *logs* what a
plugin raises. Whoever asked for D3TREE would then read "unknown speculative algorithm", so a failure here ends
the process with one sentence instead.
"""

from __future__ import annotations

import multiprocessing
import pkgutil
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

SUPPORTED_SGLANG = "0.5.23"


class Hook(NamedTuple):
    """A change to one SGLang function: where, with what, how (``HookType`` name), and the process that calls it."""

    target: str
    function: Any
    kind: str
    process: str


def register() -> None:
    """Register algorithm, attention backend and hooks; idempotent per process (SGLang loads plugins once)."""
    _check_sglang_version()
    try:
        _register_algorithm()
        _register_attention_backend()
        _register_hooks()
    except Exception as error:
        raise SystemExit(
            f"sglang-d3tree could not extend SGLang {SUPPORTED_SGLANG} ({type(error).__name__}: {error}); "
            "--speculative-algorithm d3tree is not available. Reinstall with "
            f"'pip install --force-reinstall sglang=={SUPPORTED_SGLANG} sglang-d3tree'."
        ) from error


def _check_sglang_version() -> None:
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "none"
    if found != SUPPORTED_SGLANG:
        raise SystemExit(
            f"sglang-d3tree works with sglang=={SUPPORTED_SGLANG} but found {found}, so --speculative-algorithm "
            f"d3tree cannot be offered: run 'pip install sglang=={SUPPORTED_SGLANG}', or leave this plugin out by "
            "naming the ones you want in SGLANG_PLUGINS."
        )


def _register_algorithm() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_d3tree.runtime.algorithm import ALGORITHM, D3TreeAlgorithm, worker_class

    SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=D3TreeAlgorithm)(worker_class)


def _register_attention_backend() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_d3tree.platform import ATTENTION_BACKEND

    def create(runner: Any) -> Any:
        from sglang_d3tree.runtime.attention_cpu import create_backend

        return create_backend(runner)

    register_attention_backend(ATTENTION_BACKEND)(create)
    for names in (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DRAFT_ATTENTION_BACKEND_CHOICES,
        # Rows are computed independently of their batch, so a seed gives the same draw alone and in a batch.
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
    ):
        if ATTENTION_BACKEND not in names:
            names.append(ATTENTION_BACKEND)


def _process_roles() -> set[str]:
    """Which of SGLang's processes this is; a hook elsewhere would only import what that process never needs."""
    roles = set()
    if multiprocessing.parent_process() is None or "sglang.srt.entrypoints.engine" in sys.modules:
        roles.add("main")
    if "sglang.srt.managers.scheduler" in sys.modules:
        roles.add("scheduler")
    return roles


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_d3tree.runtime import server_hooks

    roles = _process_roles()
    for hook in server_hooks.hooks():
        if hook.process not in roles:
            continue
        # SGLang would only log a target that is not there.
        pkgutil.resolve_name(hook.target)
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None:
        # `Engine(...)` loads plugins inside its constructor, too late for a hook on that constructor.
        engine.Engine.server_args_class = staticmethod(server_hooks.server_args_from_keywords)
