"""Patch SGLang's environment so that it runs without a GPU: `.venv-sglang/bin/python tests/sglang/patch_cpu.py`.

Two imports of SGLang fail on a machine without a GPU. The operators of torchvision's CUDA wheel cannot be loaded; this
program declares the two that are looked up at import, which are never called. SGLang's kernels exist for CUDA only; a
package of the same name raises an error when a kernel is called. Dense decoders with torch's attention call none.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

OPERATORS = """import torch as _torch  # declared by tests/sglang/patch_cpu.py

_declared = _torch.library.Library("torchvision", "DEF")
_declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

"""

KERNELS = '''"""Stands in for SGLang's CUDA kernels, which a machine without a GPU cannot have."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_args, **_options):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU")

    return absent
'''


def main() -> int:
    """Patch the environment of this interpreter; return the exit status. A second call changes nothing."""
    packages = Path(sysconfig.get_path("purelib"))
    if not packages.is_relative_to(sys.prefix) or sys.prefix == sys.base_prefix:
        print(
            f"error: {sys.executable} is in no virtual environment; run this with .venv-sglang/bin/python"
        )
        return 1

    operators = packages / "torchvision" / "_meta_registrations.py"
    text = operators.read_text(encoding="utf-8")
    if OPERATORS not in text:
        _write(operators, OPERATORS + text)

    kernels = packages / "sgl_kernel" / "__init__.py"
    if not kernels.exists():
        kernels.parent.mkdir(exist_ok=True)
        _write(kernels, KERNELS)

    # Without a GPU, torch refuses to allocate the pinned memory of adapters and of routed experts.
    for name in ("lora/layers.py", "lora/backend/torch_backend.py", "state_capturer/base.py"):
        file = packages / "sglang" / "srt" / name
        text = file.read_text(encoding="utf-8")
        _write(
            file, text.replace("pin_memory=True", "pin_memory=False").replace(".pin_memory()", "")
        )
    return 0


def _write(file: Path, text: str) -> None:
    """Replace a file at once, because pip would not repair a half-written one."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


if __name__ == "__main__":
    sys.exit(main())
