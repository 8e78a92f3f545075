"""smolagents: an agent that acts by writing code."""

import os

from smolagents import CodeAgent, OpenAIServerModel

model = OpenAIServerModel(model_id="gpt-4o-mini")
agent = CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=0)

print(agent.run(os.environ["TASK"]))
