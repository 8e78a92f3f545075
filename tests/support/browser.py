"""Headless Chromium, for tests of pages: what a browser makes of one, and a picture of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_chromium = pytest.mark.skipif(BINARY is None, reason="needs Chromium (Debian: apt-get install chromium)")
_ALONE = "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"  # whatever a page asks of another host fails


def browse(url: str, profile: Path, *options: str, seconds: float = 8) -> str:
    """The document of a page after `seconds` of its own time, which goes faster than ours while nothing happens."""
    assert BINARY is not None
    command = [BINARY, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += [f"--host-resolver-rules={_ALONE}", f"--virtual-time-budget={1000 * seconds:.0f}", *options]
    done = subprocess.run([*command, "--dump-dom", url], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
