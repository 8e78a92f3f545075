"""Headless Chromium, for tests of pages: what a browser makes of one, and a picture of it."""

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

_OWN = (
    Path(__file__).resolve().parents[2] / ".venv/chromium/bin/chromium"
)  # which `make test` fetches
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", str(_OWN))
BINARY = next(filter(None, map(shutil.which, _NAMES)), None)
needs_chromium = pytest.mark.skipif(
    BINARY is None, reason="needs Chromium, which `make test` fetches by apt-get"
)
_ALONE = "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # whatever a page asks of another host fails


def browse(url: str, profile: Path, *options: str, seconds: float = 8) -> str:
    """The document of a page after `seconds` of its own time, which goes faster than ours while nothing happens."""
    assert BINARY is not None
    command = [BINARY, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += [
        f"--host-resolver-rules={_ALONE}",
        f"--virtual-time-budget={1000 * seconds:.0f}",
        *options,
    ]
    done = subprocess.run(
        [*command, "--dump-dom", url], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


class Browser:
    """A page in headless Chromium that is asked and clicked while it lives, in real time.

    Commands of the DevTools protocol go through a pipe, so nothing listens.
    """

    def __init__(self, url: str, profile: Path) -> None:
        assert BINARY is not None
        (theirs_in, self._out), (own_in, theirs_out) = os.pipe(), os.pipe()
        pipes = [
            fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (theirs_in, theirs_out)
        ]  # Chromium's are 3 and 4
        os.close(theirs_in)
        os.close(theirs_out)
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
            f"--host-resolver-rules={_ALONE}",
            "--window-size=1400,1800",
        ]
        shell = ["bash", "-c", f'exec "$@" 3<&{pipes[0]} 4>&{pipes[1]}', "chromium"]
        self._process = subprocess.Popen(
            [*shell, *command, "about:blank"],
            pass_fds=pipes,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        for one in pipes:
            os.close(one)
        self._in, self._number, self._session = os.fdopen(own_in, "rb", buffering=0), 0, ""
        self._rest = b""
        self.asked: list[str] = []  # the URLs of all requests of the page and its frames
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Network", "Page", "Runtime"):
            self.send(f"{domain}.enable")
        self.send("Page.navigate", url=url)
        self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    def send(self, method: str, **params: Any) -> Any:
        """What a command answers."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                assert select.select([self._in], [], [], 60)[0], f"{method}: no answer"
                read = self._in.read(65536)
                assert read, "Chromium has ended"
                self._rest += read
            text, _, self._rest = self._rest.partition(b"\0")
            told = json.loads(text)
            if told.get("method") == "Network.requestWillBeSent":
                self.asked.append(told["params"]["request"]["url"])
            if told.get("id") == self._number:
                assert "result" in told, told
                return told["result"]

    def value(self, code: str) -> Any:
        """What JavaScript in the page comes to; a promise is waited for."""
        done = self.send("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, code: str, seconds: float = 60) -> Any:
        """What `code` comes to once that is true."""
        deadline = time.monotonic() + seconds
        while not (found := self.value(code)):
            assert time.monotonic() < deadline, f"{code}: not within {seconds:g} s"
            time.sleep(0.02)
        return found

    def picture(self, file: Path) -> None:
        """A picture of the page as it is."""
        file.write_bytes(
            base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._in.close()
