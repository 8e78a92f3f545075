"""A server with SGLang's /generate that works at so many requests at once and lets the others wait.

Anything else is answered by how many were answered. `python slotted_sglang.py SLOTS SECONDS TOKEN...` prints its port;
each request takes SECONDS and is answered by TOKENs.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


async def serve(slots: int, seconds: float, tokens: Sequence[int]) -> None:
    free, asked = asyncio.Semaphore(slots), 0
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "weight_version": "default",
    }
    content = json.dumps({"output_ids": list(tokens), "meta_info": meta}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        line
                        for line in head.lower().split(b"\r\n")
                        if line.startswith(b"content-length:")
                    ),
                    b":0",
                )
                await reader.readexactly(int(length.partition(b":")[2]))
                if head.startswith(b"POST /generate "):
                    async with free:
                        await asyncio.sleep(seconds)
                    asked += 1
                    writer.write(answer)
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n%12d" % asked)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(converse, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def slotted_server(slots: int, seconds: float, tokens: Sequence[int] = (7,)) -> Iterator[str]:
    """The URL of such a server, in a process of its own."""
    command = [sys.executable, __file__, str(slots), str(seconds), *map(str, tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), list(map(int, sys.argv[3:]))))
