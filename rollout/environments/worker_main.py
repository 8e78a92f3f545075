"""Program of a worker process: it reads requests, one line of JSON each, and answers them concurrently.

    python -P worker_main.py FILE CLASS SETTINGS

The class CLASS of the Python file FILE is called with SETTINGS, a JSON object. The instance, the
handler, has the method `async answer(request) -> reply`. Requests have a `number`, which the reply
repeats; `{"cancel": 3}` cancels request 3, whose reply is then an error. The process ends when its
standard input is closed. This file runs in other Python environments too, so it imports nothing of this
project.
"""

import asyncio
import importlib.util
import json
import os
import sys
from typing import Any, TextIO


def load_handler(path: str, class_name: str, settings: dict[str, Any]) -> Any:
    """Return the handler, an instance of a class of a Python file."""
    spec = importlib.util.spec_from_file_location("worker_handler", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # Dataclasses of the file look up the module of their annotations.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, class_name)(settings)


async def answer_requests(handler: Any, output: TextIO) -> None:
    """Answer requests concurrently until standard input ends, then finish those that still run."""
    running: dict[int, asyncio.Task[None]] = {}

    async def reply(number: int, request: dict[str, Any]) -> None:
        try:
            result = await handler.answer(request)
            line = json.dumps({**result, "number": number}, default=str)
        except BaseException as error:  # without a reply, the client would wait forever
            message = f"{type(error).__name__}: {error}"
            line = json.dumps({"error": message, "number": number})
        print(line, file=output, flush=True)
        del running[number]

    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        if "cancel" in request:
            if request["cancel"] in running:
                running[request["cancel"]].cancel()
        else:
            number = request["number"]
            running[number] = asyncio.create_task(reply(number, request))
    await asyncio.gather(*running.values(), return_exceptions=True)


def main() -> None:
    """Make the handler that the arguments name, and serve it."""
    path, class_name, settings = sys.argv[1:]
    # Environments print. Replies have the standard output to themselves.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    handler = load_handler(path, class_name, json.loads(settings))
    asyncio.run(answer_requests(handler, output))


if __name__ == "__main__":
    main()
