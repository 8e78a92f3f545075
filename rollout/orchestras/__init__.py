"""Orchestras (multi-agent workflows): who speaks when, each an async function in plain control flow.

Their roles' prompts are in roles.yaml, the parsers of replies in replies.py. One raises EnvError where its environment
lacks an ability that it asks for (see `PlayedEnv`).

ab_mcts           a tree of attempts that widens or deepens by Thompson sampling (MARTI's MARS2)
chain             a generator, a verifier and a refiner, each once (MARTI)
code_reflect      a planner, then a coder and a reflector in turn, with tests in between (UnityMAS-O code)
coder_tester      a coder and a unit tester side by side, until the program passes the tests (Stronger-MAS code)
debate            several agents answer, read each other and answer again; the majority decides (MARTI)
dsbench           a data engineer, a modeler and an analyst, who hand on files (MAPPA)
ensemble_judge    reasoners and tool users side by side, and a judge (Stronger-MAS)
game_team         a tool agent proposes actions, a plan agent takes them (Stronger-MAS games)
graph             a graph of agents, actions and conditions from the config
m_ask             a plan with an answer that searches improve step by step (M-ASK, UnityMAS-O)
memory_search     a lead asks a scout with a search tool; both remember
math_refine       a solver, a verifier, a refiner and a finalizer, each once (UnityMAS-O math)
mathchat          a solver, a coder with up to two programs and a verifier (MAPPA)
mixture           proposers side by side, and an aggregator (MARTI)
program           an agent program of one's own, behind OpenAI's or Anthropic's API
qa_decompose      a decomposer splits the question, an answerer reads what the parts found (UnityMAS-O)
qa_evidence       the same, with an extractor who reads each part for the answerer (UnityMAS-O)
qa_rewrite        a rewriter asks, a selector keeps passages, an answerer reads them (UnityMAS-O)
reason_tool       a tool user and a reasoner side by side, until they agree (Stronger-MAS math)
search_team       a verifier routes every turn to a searcher or to the answerer (Dr.MAS search)
self_verify       one agent that checks its own answer (Stronger-MAS's baseline)
single            one agent alone, in any environment
solver_verifier   a solver and a verifier in turn, until approval (Dr.MAS math)
tool_coder        a coder with a Python session, and a reviewer
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from rollout.base.yaml_files import read_yaml
from rollout.orchestras import replies
from rollout.orchestras.ab_mcts import ab_mcts
from rollout.orchestras.acting import game_team, self_verify, single
from rollout.orchestras.coding import code_reflect, coder_tester, dsbench, tool_coder
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

ORCHESTRAS: dict[str, Callable[..., Awaitable[None]]] = {  # (task, team, env, **options)
    orchestra.__name__: orchestra
    for orchestra in (
        *(ab_mcts, game_team, self_verify, single, graph),
        *(code_reflect, coder_tester, dsbench),
        *(debate, ensemble_judge, mixture, reason_tool),
        *(m_ask, qa_decompose, qa_evidence, qa_rewrite, search_team),
        *(chain, math_refine, mathchat, solver_verifier),
        *(memory_search, tool_coder, program),
    )
}

# which grow a tree of their own: a task's turns are compared within one trajectory too, and it cannot be branched
SEARCHES = frozenset({"ab_mcts"})

CHATS = frozenset(
    {"memory_search", "tool_coder"}
)  # which open chats, in which agents may call tools


for _name, _role in read_yaml(Path(__file__).with_name("roles.yaml")).items():
    register_agent(_name, system=_role["system"], user=_role["user"])(
        getattr(replies, f"parse_{_role['parse']}")
    )
