"""Orchestras: multi-agent workflows, each an async function of a task, a team and an environment.

An orchestra asks the team's agents and steps the environment, in plain control flow. It raises
EnvError if the environment lacks a method that it needs (see `PlayedEnv`). Importing this package
registers the roles of roles.yaml, whose parsers are in replies.py.

ab_mcts           agents grow a tree of attempts by Thompson sampling (MARTI's MARS2)
chain             a generator, a verifier and a refiner, each once (MARTI)
code_reflect      a planner, a coder and a reflector in turn, with tests in between (UnityMAS-O)
coder_tester      a coder and a tester at the same time, until the program passes (Stronger-MAS)
debate            agents answer, read each other's answers, answer again, and vote (MARTI)
duel              two agents play a zero-sum game against each other
dsbench           a data engineer, a modeler and an analyst, who pass on files (MAPPA)
ensemble_judge    reasoners and tool users at the same time, then a judge (Stronger-MAS)
game_team         a tool agent proposes actions, and a planner takes them (Stronger-MAS)
graph             a graph of agents, actions and conditions, which the config states
m_ask             a plan with an answer, which searches improve step by step (M-ASK, UnityMAS-O)
math_refine       a solver, a verifier, a refiner and a finalizer, each once (UnityMAS-O)
mathchat          a solver, a coder with up to two programs, and a verifier (MAPPA)
memory_search     a lead puts requests to a scout with a search tool; both remember
mixture           proposers at the same time, then an aggregator (MARTI)
program           an agent program that calls the team through OpenAI's or Anthropic's API
qa_decompose      a decomposer splits the question, and an answerer reads the passages (UnityMAS-O)
qa_evidence       as qa_decompose, with an extractor who reads for the answerer (UnityMAS-O)
qa_rewrite        a rewriter, a selector of passages, and an answerer (UnityMAS-O)
reason_tool       a tool user and a reasoner at the same time, until they agree (Stronger-MAS)
search_team       in each round a verifier chooses between a searcher and the answerer (Dr.MAS)
self_verify       one agent that checks its own answer (Stronger-MAS's baseline)
single            one agent alone, in any environment
solver_verifier   a solver and a verifier in turn, until the verifier approves (Dr.MAS)
tool_coder        a coder with tools and a reviewer; both remember
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from rollout.base.yaml_files import read_yaml
from rollout.orchestras import replies
from rollout.orchestras.ab_mcts import ab_mcts
from rollout.orchestras.acting import game_team, self_verify, single
from rollout.orchestras.coding import code_reflect, coder_tester, dsbench, tool_coder
from rollout.orchestras.duel import duel
from rollout.orchestras.graph import graph
from rollout.orchestras.m_ask import m_ask
from rollout.orchestras.parallel import debate, ensemble_judge, mixture, reason_tool
from rollout.orchestras.program import program
from rollout.orchestras.search import (
    memory_search,
    qa_decompose,
    qa_evidence,
    qa_rewrite,
    search_team,
)
from rollout.orchestras.sequential import chain, math_refine, mathchat, solver_verifier
from rollout.teams.roles import register_agent

# orchestras by name, called with (task, team, env, **options)
ORCHESTRAS: dict[str, Callable[..., Awaitable[None]]] = {
    orchestra.__name__: orchestra
    for orchestra in (
        ab_mcts,
        game_team,
        self_verify,
        single,
        duel,
        graph,
        code_reflect,
        coder_tester,
        dsbench,
        debate,
        ensemble_judge,
        mixture,
        reason_tool,
        m_ask,
        qa_decompose,
        qa_evidence,
        qa_rewrite,
        search_team,
        chain,
        math_refine,
        mathchat,
        solver_verifier,
        memory_search,
        tool_coder,
        program,
    )
}

# Orchestras that grow a tree of their own. Turns of a task are compared within one trajectory, and
# `trainer.branching` cannot be used with them.
TREE_ORCHESTRAS = frozenset({"ab_mcts"})

# Orchestras that open chats, in which agents may call tools.
CHAT_ORCHESTRAS = frozenset({"memory_search", "tool_coder"})


def _register_roles() -> None:
    """Register the roles of roles.yaml with their prompts and parsers."""
    for name, role in read_yaml(Path(__file__).with_name("roles.yaml")).items():
        register = register_agent(name, system=role["system"], user=role["user"])
        register(getattr(replies, f"parse_{role['parse']}"))


_register_roles()
