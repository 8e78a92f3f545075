"""The program that a call-based test runs: calls one function of a solution and writes its result as JSON.

Reads {"source", "function", "arguments"} from stdin. What the solution prints goes to stderr. It could write a result
of its own to this program's stdout, and gains nothing by that: what is expected is not here.
"""

import json
import os
import sys
from typing import Any

_PRELUDE = """
from typing import *
from collections import *
from itertools import *
from functools import *
from heapq import *
from bisect import *
from math import *
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
"""  # what sites with call-based problems import for every solution


def main() -> None:
    """Call, and write the result."""
    request = json.load(sys.stdin)
    with open(os.dup(1), "w") as channel:
        os.dup2(2, 1)
        scope: dict[str, Any] = {"__name__": "solution"}
        exec(_PRELUDE, scope)
        exec(compile(request["source"], "solution.py", "exec"), scope)
        name = request["function"]
        function = scope[name] if name in scope else getattr(scope["Solution"](), name)
        channel.write(json.dumps(function(*request["arguments"]), default=_plain))


def _plain(value: Any) -> Any:
    """Arrays, sets, queues and iterators as lists."""
    return value.tolist() if hasattr(value, "tolist") else list(value)


if __name__ == "__main__":
    main()
