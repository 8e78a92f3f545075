"""Reads which NCCL SGLang's torch needs from the metadata of a package index: `python -m tests.support.nccl_pins`.

Nothing is installed, and of wheels only their metadata is fetched.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

FILES = Path(__file__).resolve().parents[2] / "requirements"


def needed(pinned: str, name: str) -> str:
    """What of `name` a pinned package asks for: a pin too."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
    ]
    said = subprocess.run(
        [*command, "--report", "-", pinned], capture_output=True, text=True, check=True
    ).stdout
    (found,) = json.loads(said)["install"]
    (pin,) = {
        r.partition(";")[0].strip()
        for r in found["metadata"]["requires_dist"]
        if re.match(rf"{name}==", r)
    }
    return pin


def chain(sglang: str) -> list[str]:
    """A pin of SGLang, that of torch in it, and that of NCCL in this."""
    torch = needed(sglang, "torch")
    return [sglang, torch, needed(torch, r"nvidia-nccl-cu\d+")]


def main() -> None:
    sglang = re.search(r"^sglang==\S+", (FILES / "sglang.txt").read_text(), re.MULTILINE)
    assert sglang is not None
    pins = chain(sglang[0])
    file = FILES / "nccl.txt"
    text = re.sub(r"^# sglang==.*", f"# {' -> '.join(pins)}", file.read_text(), flags=re.MULTILINE)
    name = pins[-1].partition("==")[0]
    file.write_text(re.sub(rf"^{name}==.*", pins[-1], text, flags=re.MULTILINE))
    print(" -> ".join(pins))


if __name__ == "__main__":
    main()
