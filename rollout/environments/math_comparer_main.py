"""Program of a child process that compares math answers within limits of CPU time and memory.

    python -P math_comparer_main.py LIMIT_S

It prints `ready`. Then it reads pairs of answers, one JSON list [given, truth] per line, and prints the
verdict of each. The kernel kills it if a comparison takes LIMIT_S CPU seconds. It imports only
`math_equality.py` of this project, because the whole project would take seconds to import.
"""

import importlib.util
import json
import resource
import sys
import time
from pathlib import Path
from types import ModuleType

_MEMORY_BYTES = 2 << 30


def main(limit_s: int) -> None:
    """Compare pairs of answers from standard input until it is closed.

    Args:
        limit_s: limit of the CPU seconds of one comparison.
    """
    equality = _load_equality()
    import math_verify  # noqa: F401 - imported here, so that no limit applies to the import

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    replies = sys.stdout
    sys.stdout = sys.stderr  # so that no output of a library is taken for a reply
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        end_s = int(time.process_time()) + 1 + limit_s
        resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.RLIM_INFINITY))
        given_answer, true_answer = json.loads(line)
        verdict = equality.compare_as_expressions(given_answer, true_answer)
        if verdict is equality.AnswerComparison.DIFFERENT and _peak_bytes() > _MEMORY_BYTES // 2:
            # math-verify hides a MemoryError. Memory that grows by doubling fails above half of the
            # limit, so such a peak means that the limit was reached. The error ends this process, which
            # `Comparer` takes for an undecided comparison.
            raise MemoryError
        print(verdict.value, file=replies, flush=True)


def _load_equality() -> ModuleType:
    """Import `math_equality.py` without its package, which imports the whole project."""
    path = Path(__file__).with_name("math_equality.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _peak_bytes() -> int:
    """Return the peak size of this process.

    `ru_maxrss` is not used, because a child inherits it from a larger parent.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmPeak:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main(int(sys.argv[1]))
