"""The model, team and reward of docs/own_team.md work when they are written into its files."""

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import RunConfig
from mcore_mas.runtime.input_digests import recipe_module_digests
from rollout.config.agents import build_team
from rollout.config.reward import RewardConfig, build_allocator
from rollout.environments.tools import call_tool
from rollout.records.trajectory import ToolUse
from rollout.teams.roles import ROLES
from tests.support.played import group, trajectory, turn

PAGE = Path(__file__).parents[3] / "docs" / "own_team.md"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the files of the page into a folder, and return it."""
    for body in re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        path_comment = re.search(r"^# (\S+\.(?:py|yaml))$", body, flags=re.MULTILINE)
        if path_comment:
            path = tmp_path / path_comment[1]
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    roles = dict(ROLES)
    yield tmp_path
    ROLES.clear()
    ROLES.update(roles)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_pkg"]:
        del sys.modules[name]


def test_the_model_of_the_page_composes_with_its_suite(written: Path) -> None:
    values = resolve(["experiment=my_math", "advantage=grpo"], written / "configs")
    assert values["cold_start"] is None
    assert values["policies"]["solver"]["model"] == "/models/Qwen2.5-0.5B-Instruct"
    assert (
        "my_math_grpo: [experiment=my_math, advantage=grpo]"
        in (written / "my_suite.yaml").read_text()
    )


def test_the_team_and_the_reward_of_the_page_are_taken_up(written: Path) -> None:
    values = resolve(["experiment=my_relay"], written / "configs")
    assert values["orchestra"] == {"name": "my_pkg.teams:relay", "options": {"rounds": 2}}
    allocate = build_allocator(RewardConfig.model_validate(values["reward"]), {})
    played = group(trajectory(turn(0, "drafter"), turn(1, "editor"), outcome=1.0))
    tokens = [len(t.completion_ids) for t in played.trajectories[0].turns]
    rewards = [t.reward for t in allocate(played).trajectories[0].turns]
    assert rewards == [pytest.approx(1.0 - 0.002 * n) for n in tokens]


def test_the_tool_of_the_page_answers_with_its_options(written: Path) -> None:
    values = resolve(["experiment=my_relay", "team=shop"], written / "configs")
    config = RunConfig.from_values(values, "a test")
    assert "agents.clerk.tools=my_pkg.tools:price_list" in recipe_module_digests(config)
    agent = build_team(config.agents, {}).agents["clerk"]

    async def ask(item: str) -> tuple[str, bool]:
        (open_tools,) = agent.tools.values()
        async with open_tools() as tools:
            by_name = {tool.schema.name: tool for tool in tools}
            use = ToolUse(id="", name="price", arguments=f'{{"item": "{item}"}}')
            call = await call_tool(by_name, use, call_s=5.0, max_chars=100)
            return call.result, call.failed

    assert asyncio.run(ask("pear")) == ("4 USD", False)
    assert asyncio.run(ask("plum")) == ("there is no plum", False)
