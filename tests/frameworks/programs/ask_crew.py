"""Hands the task to the crew that `crewai create crew sums` writes, as its topic."""

import os

from crew import Sums

print(Sums().crew().kickoff(inputs={"topic": os.environ["TASK"], "current_year": "2026"}))
