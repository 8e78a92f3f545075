"""Server that speaks OpenEnv's messages: a game of guessing a number from 0 to 2, which the seed chooses.

`python openenv_server.py PORT SESSIONS` takes the number of sessions that may be open at a time.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

from aiohttp import web


class GuessingGame:
    """One session's game."""

    def __init__(self) -> None:
        self.secret = 0
        self.prize: Any = 1  # reward of the right guess
        self.guesses = 0

    async def answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a message."""
        if kind == "reset":
            self.secret = data.get("secret", random.Random(data.get("seed", 0)).randrange(3))
            self.prize = data.get("prize", 1)
            question = f"Guess a number. {data.get('note', '')}".strip()
            if data.get("shuffled"):
                question += f" {random.random()}"
            return observation({"question": question}, None, False)

        guess = data.get("guess")
        if not isinstance(guess, int) or guess > 9:
            errors = [{"loc": ["guess"], "msg": "expected a number from 0 to 9"}]
            return error("VALIDATION_ERROR", "Invalid message", errors=errors)
        if guess == 7:
            await asyncio.sleep(3)
        if guess == 8:
            return error("EXECUTION_ERROR", "the game is out of order")
        if guess == 9:
            sys.exit("the server exits")
        self.guesses += 1
        is_right = guess == self.secret
        text = f"{guess} is {'right' if is_right else 'wrong'}"
        return observation({"question": text}, self.prize if is_right else -0.25, is_right)


def observation(fields: dict[str, Any], reward: Any, done: bool) -> dict[str, Any]:
    """Return the reply to a reset or a step."""
    content = {"observation": {**fields, "metadata": {}}, "reward": reward, "done": done}
    return {"type": "observation", "data": content}


def error(code: str, message: str, **details: Any) -> dict[str, Any]:
    """Return a reply that says what went wrong."""
    return {"type": "error", "data": {"message": message, "code": code, **details}}


class Sessions:
    """The sessions of the server.

    Attributes:
        allowed: number of sessions that may be open at a time.
        open: number of open sessions.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.open = 0

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Play one session."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open == self.allowed:
            await socket.send_json(error("CAPACITY_REACHED", f"at capacity: {self.open}"))
            await socket.close()
            return socket
        self.open += 1
        try:
            game = GuessingGame()
            async for message in socket:
                content = message.json()
                if content["type"] == "close":
                    break
                await socket.send_json(await game.answer(content["type"], content["data"]))
        finally:
            self.open -= 1
        await socket.close()
        return socket


async def health(request: web.Request) -> web.Response:
    """Say that the server is ready."""
    return web.json_response({"status": "healthy"})


def main() -> None:
    """Serve on a port of loopback."""
    port, sessions = map(int, sys.argv[1:])
    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/ws", Sessions(sessions).serve)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main()
