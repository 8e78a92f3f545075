"""LangGraph: a graph of a solver and a checker."""

import os
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

solver_model = ChatOpenAI(model="gpt-4o-mini")
checker_model = ChatOpenAI(model="gpt-4o")


class State(TypedDict):
    problem: str
    solution: str
    answer: str


def solve(state: State) -> dict[str, str]:
    reply = solver_model.invoke([("system", "Solve the problem."), ("user", state["problem"])])
    return {"solution": reply.content}


def check(state: State) -> dict[str, str]:
    system = "Check the solution and give the final answer."
    reply = checker_model.invoke([("system", system), ("user", f"{state['problem']}\n{state['solution']}")])
    return {"answer": reply.content}


builder = StateGraph(State)
builder.add_node("solve", solve)
builder.add_node("check", check)
builder.add_edge(START, "solve")
builder.add_edge("solve", "check")
builder.add_edge("check", END)
graph = builder.compile()

print(graph.invoke({"problem": os.environ["TASK"]})["answer"])
