"""A planner and a worker: two model names of one program, which are two policies of the team."""

import sys

from openai import OpenAI

client = OpenAI()


def ask(model: str, text: str) -> str:
    """Return a model's reply to a text."""
    completion = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}]
    )
    return completion.choices[0].message.content or ""


problem = sys.stdin.read()
plan = ask("planner", f"Name the two numbers: {problem}")
print(ask("worker", f"Add the numbers. {plan} {problem}"))
