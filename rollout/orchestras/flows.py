"""Who may speak after whom, by orchestra, as edges of a Mermaid flowchart; a test plays every team against its own.

Nodes are the agents of `configs/team/<orchestra>.yaml`, `task` and `answer`. `a & b` speak side by side. A `graph` is
its own flow.
"""

from __future__ import annotations

FLOWS: dict[str, tuple[str, ...]] = {
    "ab_mcts": (
        "task --> generator_1 & generator_2",
        "generator_1 & generator_2 -->|one of them adds a node| generator_1 & generator_2",
        "generator_1 & generator_2 -->|nodes used up: the best one| answer",
    ),
    "chain": (
        "task --> generator",
        "generator --> verifier",
        "verifier --> refiner",
        "refiner --> answer",
    ),
    "code_reflect": (
        "task --> planner",
        "planner --> coder",
        "coder -->|a visible test fails| reflector",
        "reflector --> coder",
        "coder -->|all visible tests pass, or programs used up| answer",
    ),
    "coder_tester": (
        "task --> coder & tester",
        "coder & tester -->|they disagree| coder & tester",
        "coder & tester -->|the program passes the tests, or turns used up| answer",
    ),
    "debate": (
        "task --> debater_1 & debater_2 & debater_3",
        "debater_1 & debater_2 & debater_3 -->|next round| debater_1 & debater_2 & debater_3",
        "debater_1 & debater_2 & debater_3 -->|majority of the last round| answer",
    ),
    "dsbench": (
        "task --> engineer",
        "engineer -->|files missing, turns left| engineer",
        "engineer -->|X_train, y_train, X_test| modeler",
        "modeler -->|files missing, turns left| modeler",
        "modeler -->|model| analyst",
        "analyst -->|files missing, turns left| analyst",
        "analyst -->|submission| answer",
    ),
    "ensemble_judge": (
        "task --> reasoner & tool_user",
        "reasoner & tool_user --> judge",
        "judge --> answer",
    ),
    "game_team": (
        "task --> tool",
        "tool -->|proposal| planner",
        "planner -->|actions taken, not yet solved| tool",
        "planner -->|solved, lost, or turns used up| answer",
    ),
    "m_ask": (
        "task --> planner",
        "planner --> searcher",
        "searcher -->|query| summariser",
        "searcher -->|ends the search| answer",
        "summariser --> updater",
        "updater --> answerer",
        "answerer -->|turns left| searcher",
        "answerer -->|turns used up| answer",
    ),
    "math_refine": (
        "task --> solver",
        "solver --> verifier",
        "verifier --> refiner",
        "refiner --> finalizer",
        "finalizer --> answer",
    ),
    "mathchat": (
        "task --> solver",
        "solver --> coder",
        "coder -->|program failed, one more left| coder",
        "coder -->|program ran, or programs used up| verifier",
        "verifier --> answer",
    ),
    "mixture": (
        "task --> proposer_1 & proposer_2 & proposer_3",
        "proposer_1 & proposer_2 & proposer_3 --> aggregator",
        "aggregator --> answer",
    ),
    "qa_decompose": (
        "task --> decomposer",
        "decomposer -->|up to three searches| answerer",
        "answerer --> answer",
    ),
    "qa_evidence": (
        "task --> decomposer",
        "decomposer -->|up to three searches| extractor",
        "extractor -->|side by side, once a query| extractor",
        "extractor --> answerer",
        "decomposer -->|malformed: nothing to read| answerer",
        "answerer --> answer",
    ),
    "qa_rewrite": (
        "task --> rewriter",
        "rewriter -->|passages found| selector",
        "rewriter -->|nothing found| answerer",
        "selector --> answerer",
        "answerer --> answer",
    ),
    "reason_tool": (
        "task --> tool_user & reasoner",
        "tool_user & reasoner -->|they disagree| tool_user & reasoner",
        "tool_user & reasoner -->|answers equal, or turns used up| answer",
    ),
    "search_team": (
        "task --> verifier",
        "verifier -->|not enough| searcher",
        "searcher -->|search| verifier",
        "verifier -->|enough, or last turn| answerer",
        "answerer --> answer",
    ),
    "self_verify": (
        "task --> solver",
        "solver -->|a new answer| solver",
        "solver -->|the same answer twice, or turns used up| answer",
    ),
    "single": (
        "task --> player",
        "player -->|not yet ended| player",
        "player -->|ended, or turns used up| answer",
    ),
    "solver_verifier": (
        "task --> solver",
        "solver -->|attempts left| verifier",
        "verifier -->|reject| solver",
        "verifier -->|approve| answer",
        "solver -->|last attempt| answer",
    ),
}
