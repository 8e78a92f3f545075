"""OpenAI Agents SDK: a solver and a checker, run one after the other."""

import asyncio
import os

from agents import Agent, Runner

solver = Agent(name="Solver", instructions="Solve the problem.", model="gpt-4o-mini")
checker = Agent(name="Checker", instructions="Check the solution and give the final answer.", model="gpt-4o")


async def main() -> None:
    problem = os.environ["TASK"]
    solution = await Runner.run(solver, problem)
    final = await Runner.run(checker, f"{problem}\n{solution.final_output}")
    print(final.final_output)


if __name__ == "__main__":
    asyncio.run(main())
