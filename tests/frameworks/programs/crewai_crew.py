"""CrewAI: a crew of a solver and a checker, one task after the other."""

import os

from crewai import Agent, Crew, Task

solver = Agent(role="Solver", goal="Solve the problem.", backstory="You are good at sums.", llm="gpt-4o-mini")
checker = Agent(
    role="Checker", goal="Check the solution and give the final answer.", backstory="You are careful.", llm="gpt-4o"
)
solve = Task(description="{problem}", expected_output="The answer.", agent=solver)
check = Task(
    description="Check the solution of: {problem}", expected_output="The final answer.", agent=checker, context=[solve]
)
crew = Crew(agents=[solver, checker], tasks=[solve, check])

print(crew.kickoff(inputs={"problem": os.environ["TASK"]}))
