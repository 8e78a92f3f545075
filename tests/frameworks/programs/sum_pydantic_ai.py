"""A pydantic-ai agent whose answer is the typed output of a tool call."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent


class Answer(BaseModel):
    """The sum."""

    value: int


agent = Agent("openai-chat:gpt-4o", output_type=Answer, system_prompt="Reply with the sum.")
result = agent.run_sync(sys.stdin.read())
print(f"\\boxed{{{result.output.value}}}")
