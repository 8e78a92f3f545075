"""Give the task, as its topic, to the crew that `crewai create crew sums` writes."""

import os

from crew import Sums

print(Sums().crew().kickoff(inputs={"topic": os.environ["TASK"], "current_year": "2026"}))
