"""SGLang servers as real processes: started from their command line, spoken to over HTTP, stopped with all children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import requests

START_TIMEOUT = float(os.environ.get("SGLANG_D3TREE_TEST_START_TIMEOUT", "400"))
# The two commands that start a server.
LAUNCH = (sys.executable, "-m", "sglang.launch_server")
SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


class Server:
    """One server process group.

    arguments: all flags but ``--host`` and ``--port``. entry: the command they are for.
    """

    def __init__(
        self, *arguments: Any, entry: Sequence[str] = LAUNCH, environment: dict[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [*entry, *(str(a) for a in arguments)]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self._log = tempfile.NamedTemporaryFile(prefix="d3tree-server-", suffix=".log", delete=False)  # noqa: SIM115
        self.log_path = Path(self._log.name)
        self.process = subprocess.Popen(
            self.command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
        )

    def wait_until_ready(self, timeout: float = START_TIMEOUT) -> Server:
        """Block until the server answers ``/health``; its log goes into the error otherwise."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except requests.RequestException:
                pass
            time.sleep(0.5)
        code = self.process.poll()
        reason = f"ended with code {code}" if code is not None else f"was not ready after {timeout:.0f} s"
        self.stop()
        raise RuntimeError(f"{' '.join(self.command)} {reason}; its log ends:\n{self.log_tail()}")

    def stop(self) -> None:
        """End the whole process group."""
        try:
            group = os.getpgid(self.process.pid)
        except ProcessLookupError:
            group = self.process.pid
        # SGLang's children join the group that the start opened.
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        for child in children:
            if child.is_running():
                child.kill()
        self.process.wait(timeout=30)
        self._log.close()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 60) -> str:
        lines_of_interest = [line for line in self.log().splitlines() if "GET /health" not in line]
        return "\n".join(lines_of_interest[-lines:])

    # ------------------------------------------------------------ requests

    def post(self, path: str, body: dict[str, Any], timeout: float = 300) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=timeout)

    def generate(self, prompt: str | Sequence[int] | Sequence[str], timeout: float = 300, **options: Any) -> Any:
        """``/generate``; sampling parameters and the rest of the body as keywords, greedy unless told otherwise.

        Returns:
            The answer: a dict, or a list of dicts for a list of prompts or ``n`` > 1.
        """
        body = generate_body(prompt, **options)
        response = self.post("/generate", body, timeout)
        assert response.status_code == 200, f"{response.status_code}: {response.text[:2000]}\n{self.log_tail(30)}"
        return response.json()

    def chat(self, content: Any, timeout: float = 300, **options: Any) -> dict[str, Any]:
        """One user message to ``/v1/chat/completions``, greedy unless told otherwise."""
        messages = content if _is_messages(content) else [{"role": "user", "content": content}]
        body = {"model": "default", "messages": messages, "temperature": 0, **options}
        response = self.post("/v1/chat/completions", body, timeout)
        assert response.status_code == 200, f"{response.status_code}: {response.text[:2000]}\n{self.log_tail(30)}"
        return response.json()

    def internal_state(self) -> dict[str, Any]:
        state: dict[str, Any] = requests.get(f"{self.url}/server_info", timeout=60).json()["internal_states"][0]
        return state

    def set_options(self, **options: Any) -> None:
        """Change D3TREE options of the running server: ``set_options(policy="chain")``."""
        response = self.post("/d3tree/options", options)
        assert response.status_code == 200, f"{options}: {response.status_code} {response.text}\n{self.log_tail(30)}"

    def flush_cache(self) -> None:
        """Empty the radix cache; the server must be idle."""
        for _ in range(50):
            if self.post("/flush_cache", {}).status_code == 200:
                return
            time.sleep(0.2)
        raise AssertionError(f"the cache could not be flushed\n{self.log_tail()}")

    def used_tokens(self) -> int:
        """KV slots in use, radix cache included."""
        load = requests.get(f"{self.url}/v1/loads?include=all", timeout=60).json()["loads"][0]
        return int(load["num_used_tokens"])


def generate_body(prompt: Any, **options: Any) -> dict[str, Any]:
    """The body of a ``/generate`` request; keywords that are no request field go to ``sampling_params``."""
    top_level = ("image_data", "stream", "rid", "return_logprob", "return_hidden_states", "custom_logit_processor")
    body: dict[str, Any] = {key: options.pop(key) for key in top_level if key in options}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 32, **options}
    is_ids = isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], int | list)
    body["input_ids" if is_ids else "text"] = prompt
    return body


def _is_messages(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and "role" in content[0]


def _die_with_parent() -> None:
    """In the child, before it becomes the server: a test run that is killed leaves no server behind."""
    if sys.platform == "linux":
        parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def without_times(text: str) -> str:
    """Log text without its time stamps."""
    return re.sub(r"\[\d{4}-\d\d-\d\d [\d:]+[^\]]*\] ", "", text)
