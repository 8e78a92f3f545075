"""LlamaIndex's starter agent, with its tool."""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai import OpenAI


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


agent = FunctionAgent(
    tools=[add],
    llm=OpenAI(model="gpt-4o-mini"),
    system_prompt="You are a helpful assistant that can add two numbers.",
)


async def main() -> None:
    """Print the agent's answer to the standard input."""
    response = await agent.run(sys.stdin.read())
    print(str(response))


asyncio.run(main())
