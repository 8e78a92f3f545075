"""AG2 (AutoGen): two agents who chat."""

import os

from autogen import ConversableAgent, LLMConfig

solver = ConversableAgent(
    name="solver",
    system_message="Solve the problem.",
    llm_config=LLMConfig({"api_type": "openai", "model": "gpt-4o-mini"}),
)
checker = ConversableAgent(
    name="checker",
    system_message="Check the solution and give the final answer.",
    llm_config=LLMConfig({"api_type": "openai", "model": "gpt-4o"}),
    human_input_mode="NEVER",
)

problem = os.environ["TASK"]
solution = checker.initiate_chat(solver, message=problem, max_turns=1, silent=True)
final = solver.initiate_chat(checker, message=f"{problem}\n{solution.summary}", max_turns=1, silent=True)
print(final.summary)
