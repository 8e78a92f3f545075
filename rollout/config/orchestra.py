"""Section of a config about the orchestra, which decides who speaks when."""

from collections.abc import Mapping

from rollout.base.hints import nearest_hint
from rollout.base.options import Registry
from rollout.config.agents import AgentConfig, build_role
from rollout.config.choice import Choice
from rollout.orchestras import CHAT_ORCHESTRAS, ORCHESTRAS
from rollout.orchestras.program import check_program
from rollout.records.trajectory import Task
from rollout.teams.episode import Episode
from rollout.teams.source_checks import (
    chat_agents,
    describe_misuse,
    filled_slots,
    possible_agents,
    required_agents,
    template_slots,
)
from rollout.teams.team import TeamSession

_LISTED_SLOTS = 10  # an error lists the slots that an orchestra fills if there are fewer


class OrchestraConfig(Choice):
    """The orchestra of a team."""

    registry = Registry(
        kind="orchestra", registered=ORCHESTRAS, takes=("task", "team", "env"), coroutine=True
    )

    def check_agents(self, team: Mapping[str, AgentConfig]) -> None:
        """Refuse a team that cannot play this orchestra.

        Raises:
            ValueError: an agent has tools but no chats; a summariser is missing, or its template does not
                have the slot {conversation} alone; a slot of a template is not filled; a user's
                orchestra or a graph asks an agent that is missing; a user's orchestra leaves an
                agent of the team unasked, or calls the team or the environment wrongly; or no
                trajectory can be played with the options of orchestra `program`.
        """
        self._check_tools(team)
        templates = {name: build_role(name, agent).user for name, agent in team.items()}
        summarisers: set[str] = set()
        for agent in team.values():
            if agent.chats.summariser is not None:
                summarisers.add(agent.chats.summariser)
        for name in summarisers:
            if name not in team or set(template_slots(name, templates[name])) != {"conversation"}:
                raise ValueError(
                    f"chats.summariser '{name}': expected an agent whose user template has the slot "
                    f"{{conversation}} alone, like that of role chat_summariser; agents: {', '.join(team)}"
                )
        if self.name == "program":
            check_program(team, **self.options)  # the program writes the prompts itself
        elif self.name == "graph":
            self.arguments["graph"].check_agents(templates)
        else:
            self._check_calls(team, summarisers)
            templates_to_fill = {
                name: text for name, text in templates.items() if name not in summarisers
            }
            self._check_slots(templates_to_fill)

    def _check_tools(self, team: Mapping[str, AgentConfig]) -> None:
        """Refuse an agent with tools if the orchestra opens no chat with it, as tools are called in chats.

        A user's orchestra is not checked if its source does not show with whom it opens chats.
        """
        if self.name in CHAT_ORCHESTRAS:
            return
        if self.name in ORCHESTRAS:
            chat_partners: frozenset[str] | None = frozenset()
            advice = f"orchestras that open chats: {', '.join(sorted(CHAT_ORCHESTRAS))}"
        else:
            chat_partners = chat_agents(self.registry.find(self.name))
            advice = "see docs/own_team.md#tools, or leave the tools out"
        if chat_partners is None:
            return
        for name, agent in team.items():
            if agent.tools and name not in chat_partners:
                raise ValueError(
                    f"agent '{name}' has tools, and orchestra '{self.name}' opens no chats with it in which to call "
                    f"them; {advice}"
                )

    def _check_calls(self, team: Mapping[str, AgentConfig], summarisers: set[str]) -> None:
        """Check the calls of team and environment in the code of a user's orchestra.

        Args:
            team: agents of the team.
            summarisers: agents of the team that sum up chats, which the orchestra need not ask.
        """
        if self.name in ORCHESTRAS:
            return
        orchestra = self.registry.find(self.name)
        misuse = describe_misuse(orchestra, Task, TeamSession, Episode)
        if misuse:
            raise ValueError(f"orchestra '{self.name}': {misuse}")
        missing = sorted(required_agents(orchestra) - team.keys())
        if missing:
            name = missing[0]
            raise ValueError(
                f"orchestra '{self.name}' asks agent '{name}', who is not in the team; agents: {', '.join(team)}"
                f"{nearest_hint(name, team)}"
            )
        possible = possible_agents(orchestra)
        if possible is None:  # the source does not show the agents
            return
        for name in team:
            if name not in possible | summarisers:
                raise ValueError(
                    f"agent '{name}' is never asked by orchestra '{self.name}', so it would not be trained; ask it, or "
                    f"leave it out of the team; agents that are asked: {', '.join(sorted(possible)) or 'none'}"
                )

    def _check_slots(self, templates: Mapping[str, str]) -> None:
        """Check that the orchestra fills the slots of the user templates."""
        for name, template in templates.items():
            filled = filled_slots(self.registry.find(self.name), name)
            if filled is None:
                continue
            for slot in template_slots(name, template):
                if slot in filled:
                    continue
                filled_hint = ""
                if len(filled) < _LISTED_SLOTS:
                    filled_hint = f"it fills {', '.join(sorted(filled))}; "
                raise ValueError(
                    f"agent '{name}': orchestra '{self.name}' does not fill the slot {{{slot}}} of its user "
                    f"template; {filled_hint}a brace that is text is written twice"
                    f"{nearest_hint(slot, filled)}"
                )
