"""CAMEL's chat agent."""

import sys

from camel.agents import ChatAgent

agent = ChatAgent("You are a helpful assistant.", model="gpt-4")
response = agent.step(sys.stdin.read())
print(response.msgs[0].content)
