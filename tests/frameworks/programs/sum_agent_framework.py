"""An agent of Microsoft Agent Framework, the successor of AutoGen, through the Responses API."""

import asyncio
import sys

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient

agent = Agent(
    client=OpenAIChatClient(model="gpt-4o-mini"), instructions="You are a helpful assistant."
)


async def main() -> None:
    """Print the agent's answer to the standard input."""
    print((await agent.run(sys.stdin.read())).text)


asyncio.run(main())
