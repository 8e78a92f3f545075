"""Anthropic SDK: a solver, and a checker who sees what it said."""

import os

from anthropic import Anthropic

client = Anthropic()


def ask(model: str, system: str, text: str) -> str:
    message = client.messages.create(
        model=model, max_tokens=64, system=system, messages=[{"role": "user", "content": text}]
    )
    return message.content[0].text


problem = os.environ["TASK"]
solution = ask("claude-haiku-4-5", "Solve the problem.", problem)
print(ask("claude-opus-4-5", "Check the solution and give the final answer.", f"{problem}\n{solution}"))
