"""Program of a call-based test: it calls one function of a solution and writes the result as JSON.

It reads {"source", "function", "arguments"} from stdin. The output of the solution goes to stderr.
A solution may write a forged result to this program's stdout, but cannot write the expected one,
because the expected result is not in this process.
"""

import json
import os
import sys
from typing import Any

# names that sites with call-based problems import for every solution
_PRELUDE = """
from typing import *
from collections import *
from itertools import *
from functools import *
from heapq import *
from bisect import *
from math import *
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
"""


def main() -> None:
    """Call the function and write its result."""
    request = json.load(sys.stdin)
    with open(os.dup(1), "w") as result_file:
        os.dup2(2, 1)
        scope: dict[str, Any] = {"__name__": "solution"}
        exec(_PRELUDE, scope)
        exec(compile(request["source"], "solution.py", "exec"), scope)
        name = request["function"]
        function = scope[name] if name in scope else getattr(scope["Solution"](), name)
        result = function(*request["arguments"])
        result_file.write(json.dumps(result, default=_to_list))


def _to_list(value: Any) -> Any:
    """Convert arrays, sets, queues and iterators to lists."""
    return value.tolist() if hasattr(value, "tolist") else list(value)


if __name__ == "__main__":
    main()
