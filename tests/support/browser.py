"""Headless Chromium for tests of pages: the document that it renders, and screenshots."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest

# `make test` downloads Chromium to this path.
_DOWNLOADED = Path(__file__).resolve().parents[2] / ".venv/chromium/bin/chromium"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", str(_DOWNLOADED))
BINARY = next(filter(None, map(shutil.which, _NAMES)), None)
needs_chromium = pytest.mark.skipif(
    BINARY is None, reason="needs Chromium, which `make test` fetches by apt-get"
)
# Requests of a page to other hosts fail.
_RESOLVER_RULES = "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


def browse(url: str, profile: Path, *options: str, seconds: float = 8) -> str:
    """Return the document of a page after `seconds` of virtual time.

    Virtual time jumps while the page has nothing to do.
    """
    assert BINARY is not None
    command = [BINARY, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += [
        f"--host-resolver-rules={_RESOLVER_RULES}",
        f"--virtual-time-budget={1000 * seconds:.0f}",
        *options,
    ]
    result = subprocess.run(
        [*command, "--dump-dom", url], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


class Browser:
    """Page in headless Chromium, controlled by JavaScript in real time.

    Commands of the DevTools protocol are sent through a pipe, so that no port is opened.

    Attributes:
        requests: URLs of all requests of the page and its frames.
    """

    def __init__(self, url: str, profile: Path) -> None:
        assert BINARY is not None
        command_reader, self._command_writer = os.pipe()
        answer_reader, answer_writer = os.pipe()
        # Chromium uses descriptors 3 and 4, so ours must be others.
        chromium_pipes = [
            fcntl.fcntl(pipe, fcntl.F_DUPFD, 10) for pipe in (command_reader, answer_writer)
        ]
        os.close(command_reader)
        os.close(answer_writer)
        command = [
            BINARY,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--no-first-run",
        ]
        command += [
            f"--user-data-dir={profile}",
            f"--host-resolver-rules={_RESOLVER_RULES}",
            "--window-size=1400,1800",
        ]
        shell = [
            "bash",
            "-c",
            f'exec "$@" 3<&{chromium_pipes[0]} 4>&{chromium_pipes[1]}',
            "chromium",
        ]
        self._process = subprocess.Popen(
            [*shell, *command, "about:blank"],
            pass_fds=chromium_pipes,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        for pipe in chromium_pipes:
            os.close(pipe)

        self._answers = os.fdopen(answer_reader, "rb", buffering=0)
        self._unread = b""  # answers that were received and not parsed
        self._command_number = 0
        self._session = ""
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Network", "Page", "Runtime"):
            self.send(f"{domain}.enable")
        self.send("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def send(self, method: str, **params: Any) -> Any:
        """Send a command of the DevTools protocol; return its result."""
        self._command_number += 1
        message = {"id": self._command_number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._command_writer, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._unread:
                assert select.select([self._answers], [], [], 60)[0], f"{method}: no answer"
                received = self._answers.read(65536)
                assert received, "Chromium has ended"
                self._unread += received
            text, _, self._unread = self._unread.partition(b"\0")
            answer = json.loads(text)
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("id") == self._command_number:
                assert "result" in answer, answer
                return answer["result"]

    def value(self, code: str) -> Any:
        """Return the value of JavaScript code in the page; wait if the value is a promise."""
        answer = self.send(
            "Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, code: str, seconds: float = 60) -> Any:
        """Wait until the value of `code` is true; return the value."""
        deadline = time.monotonic() + seconds
        value = self.value(code)
        while not value:
            assert time.monotonic() < deadline, f"{code}: not within {seconds:g} s"
            time.sleep(0.02)
            value = self.value(code)
        return value

    def picture(self, file: Path) -> None:
        """Write a screenshot of the page."""
        file.write_bytes(
            base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._command_writer)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._answers.close()
