"""Fake SGLang server that answers a limited number of /generate requests at a time.

`python slotted_sglang.py SLOTS SECONDS TOKEN...` prints its port. Each request takes SECONDS, and its
reply is the TOKENs. The reply to any other request is the number of requests answered so far.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


async def serve(slots: int, seconds: float, tokens: Sequence[int]) -> None:
    """Serve until this process is terminated."""
    free_slots = asyncio.Semaphore(slots)
    answered = 0
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "weight_version": "default",
    }
    content = json.dumps({"output_ids": list(tokens), "meta_info": meta}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)

    async def handle_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body_bytes = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        body_bytes = int(line.partition(b":")[2])
                await reader.readexactly(body_bytes)
                if head.startswith(b"POST /generate "):
                    async with free_slots:
                        await asyncio.sleep(seconds)
                    answered += 1
                    writer.write(answer)
                else:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n%12d" % answered)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle_connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def slotted_server(slots: int, seconds: float, tokens: Sequence[int] = (7,)) -> Iterator[str]:
    """Run the server in another process for this block; yield its URL."""
    command = [sys.executable, __file__, str(slots), str(seconds), *map(str, tokens)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), list(map(int, sys.argv[3:]))))
