"""Environments of the packages `verifiers` and OpenEnv that the package index has, and how they are played.

`make test-environments` installs them. Each environment is unchanged; its options and replies are here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rollout.environments.openenv import OpenEnvEnv
from rollout.environments.verifiers import PROGRAM, VerifiersEnv, list_tasks
from rollout.records.trajectory import Trajectory
from tests.support.casts import SUM, play

ROOT = Path(__file__).resolve().parents[2]
VERIFIERS = ROOT / ".venv-verifiers" / "bin"
OPENENV = ROOT / ".venv-openenv" / "bin"
OPENENV_2 = ROOT / ".venv-openenv-2" / "bin"

SERVED = ("--host", "127.0.0.1", "--port", "{port}")
ECHO: dict[str, Any] = {
    "command": [
        str(OPENENV / "uvicorn"),
        "my_env.server.app:app",
        "--app-dir",
        str(OPENENV.parent),
        *SERVED,
    ],
    "action": {"message": "{text}"},
    "observation": "{echoed_message}",
}
POEMS: dict[str, Any] = {
    "id": "stardata.envs.constraint_gym",
    "args": {"forms": ["lipogram"], "topics_per_form": 8},
    "python": str(VERIFIERS / "python"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """An environment, and replies with which it is played.

    Attributes:
        package: name on the package index.
        python: folder of the programs of the environment that it is installed in.
        options: options of the environment `verifiers` or `openenv`.
        replies: replies of the agent, in order.
        key: arguments of the reset, of an environment of OpenEnv.
    """

    package: str
    python: Path
    options: Mapping[str, Any]
    replies: Sequence[str]
    key: Mapping[str, Any] = field(default_factory=dict)

    def play(self) -> Trajectory:
        """Play an episode with the replies."""
        kind = self.play_verifiers if "id" in self.options else self.play_openenv
        return kind()

    def play_verifiers(self) -> Trajectory:
        """Play the first row of the data set through the gateway."""
        options = {"python": str(self.python / "python"), "args": {}, **self.options}
        row = list_tasks(options["id"], options["python"], options["args"], 1)["train"][0]
        trajectory, _ = play(
            "program",
            {"agent": "program_agent"},
            *self.replies,
            task=replace(SUM, answers=(json.dumps(row),)),
            make_env=partial(VerifiersEnv, **options),
            call=PROGRAM,
            models={"*": "agent"},
        )
        return trajectory

    def play_openenv(self) -> Trajectory:
        """Play a game of the server."""
        trajectory, _ = play(
            "single",
            {"player": "program_agent"},
            *self.replies,
            task=replace(SUM, prompt="", answers=(json.dumps(self.key),)),
            make_env=partial(OpenEnvEnv, max_turns=len(self.replies), **self.options),
            max_turns=len(self.replies),
        )
        return trajectory


ENVIRONMENTS = {
    "verifiers: one turn, an argument with citations": Published(
        package="sophistry-bench-sprint",
        python=VERIFIERS,
        options={"id": "sophistry-bench-sprint", "args": {"n_items": 4}},
        replies=["<claim>It is so.</claim><cite>no quote</cite>"],
    ),
    "verifiers: one turn, a poem without a letter": Published(
        package="staros-stardata",
        python=VERIFIERS,
        options=POEMS,
        replies=["A cold moon climbs.\nIt lights rock, sand and ash."],
    ),
    "verifiers: one turn, sums of reasoning-gym": Published(
        package="reasoning-gym",
        python=VERIFIERS,
        options={"id": "tests.environments.gym_env"},
        replies=["<answer>0</answer>"],
    ),
    "verifiers: several turns with a tool": Published(
        package="verifiers",
        python=VERIFIERS,
        options={"id": "tests.environments.tool_env"},
        replies=[
            '```tool\n{"name": "add", "arguments": {"a": 0, "b": 4}}\n```',
            "It is 4.",
        ],
    ),
    "OpenEnv: two turns, the environment of `openenv init`": Published(
        package="openenv", python=OPENENV, options=ECHO, replies=["hi", "hello there"]
    ),
    "OpenEnv: one turn, sums of reasoning-gym by Nenyax": Published(
        package="nenyax",
        python=OPENENV,
        options={
            "command": [
                str(OPENENV / "nenyax"),
                "serve",
                "reasoning_gym:basic_arithmetic?size=20",
                *SERVED,
            ],
            "action": {"value": "{text}"},
            "observation": "{text}",
        },
        replies=["<answer>-61</answer>"],
        key={"task_id": "3"},
    ),
    "OpenEnv: one turn, answers about trials": Published(
        package="openenv-dipg-safety",
        python=OPENENV_2,
        options={
            "command": [
                "env",
                f"DIPG_DATASET_PATH={Path(__file__).with_name('patients.jsonl')}",
                str(OPENENV_2 / "uvicorn"),
                "med_safety_gym.app:app",
                *SERVED,
            ],
            "action": {"llm_response": "{text}"},
            "observation": "{context}\n\n{question}",
        },
        replies=["<answer>In 4 of 12 patients.</answer>"],
    ),
}
