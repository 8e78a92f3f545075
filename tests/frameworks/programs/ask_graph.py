"""Give the task to a LangGraph graph, as the server of its command line does."""

import os

from agent import graph

print(graph.invoke({"messages": [("user", os.environ["TASK"])]})["messages"][-1].content)
