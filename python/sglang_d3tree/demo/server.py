"""A server in a child process: started, waited for, stopped with everything it spawned."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from tqdm import tqdm


class ServerFailed(RuntimeError):
    """The server ended before it was ready; the message carries the end of its log."""


def free_port() -> int:
    """A port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """``python -m sglang.launch_server`` as a context manager.

    Args:
        arguments: command-line arguments, without host and port.
        name: shown on the progress bar.
        echo: also print the server's log.
    """

    def __init__(self, arguments: Sequence[str], *, name: str = "server", echo: bool = False) -> None:
        self.arguments = list(arguments)
        self.name = name
        self.echo = echo
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server, which leads its process group."""
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    @property
    def log_tail(self) -> str:
        """The last lines the server wrote."""
        if self._log is None:
            return ""
        return "\n".join(Path(self._log.name).read_text(errors="replace").splitlines()[-25:])

    def start(self) -> None:
        """Launch without waiting."""
        self._log = tempfile.NamedTemporaryFile(prefix=f"d3tree-{self.name}-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(self.port)]
        self._process = subprocess.Popen(
            command + self.arguments,
            stdout=None if self.echo else self._log,
            stderr=None if self.echo else subprocess.STDOUT,
            env={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ},
            start_new_session=True,
        )

    def wait_ready(self, timeout: float = 600.0) -> None:
        """Block until the server answers.

        Raises:
            ServerFailed: when it ends or does not answer within ``timeout`` seconds.
        """
        assert self._process is not None
        started = time.monotonic()
        with tqdm(desc=f"starting {self.name}", unit="s", bar_format="{desc}: {n:.0f} s", leave=False) as bar:
            while time.monotonic() - started < timeout:
                if self._process.poll() is not None:
                    raise ServerFailed(f"{self.name} ended with code {self._process.returncode}:\n{self.log_tail}")
                if self._answers():
                    return
                time.sleep(1.0)
                bar.update(1)
        raise ServerFailed(f"{self.name} did not answer within {timeout:.0f} s:\n{self.log_tail}")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        """End the server and its children; harmless when it is gone already."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(timeout=15)
                break
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self._process = None

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
