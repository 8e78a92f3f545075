"""Update requirements/nccl.txt to the NCCL version that the pinned SGLang's torch requires.

`python -m tests.support.nccl_pins` reads it from the metadata of a package index. It installs nothing
and downloads no wheels.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

FILES = Path(__file__).resolve().parents[2] / "requirements"


def required_pin(pinned: str, name: str) -> str:
    """Return the pin of distribution `name` (a pattern) in the requirements of a pinned package."""
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
    result = subprocess.run(
        [*command, "--report", "-", pinned], capture_output=True, text=True, check=True
    )
    (package,) = json.loads(result.stdout)["install"]
    (pin,) = {
        requirement.partition(";")[0].strip()
        for requirement in package["metadata"]["requires_dist"]
        if re.match(rf"{name}==", requirement)
    }
    return pin


def chain(sglang: str) -> list[str]:
    """Return the pins of SGLang, of the torch that it requires, and of the NCCL that torch requires."""
    torch = required_pin(sglang, "torch")
    return [sglang, torch, required_pin(torch, r"nvidia-nccl-cu\d+")]


def main() -> None:
    """Write the pins to requirements/nccl.txt, and print them."""
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
