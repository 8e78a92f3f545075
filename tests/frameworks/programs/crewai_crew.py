"""CrewAI: a crew of a solver and a checker, whose tasks follow each other."""

import os

from crewai import Agent, Crew, Process, Task

solver = Agent(role="Solver", goal="Solve the problem", backstory="You are good at sums.", llm="gpt-4o-mini")
checker = Agent(role="Checker", goal="Find mistakes", backstory="You are careful.", llm="gpt-4o")

solving = Task(description=os.environ["TASK"], expected_output="A number.", agent=solver)
checking = Task(
    description="Check the solution and give the final answer.",
    expected_output="A number.",
    agent=checker,
    context=[solving],
)
crew = Crew(agents=[solver, checker], tasks=[solving, checking], process=Process.sequential)

print(crew.kickoff())
