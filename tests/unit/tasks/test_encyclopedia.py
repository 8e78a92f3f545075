"""Questions about the encyclopedia: disjoint splits, and demonstrations that read like rollouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from rollout.environments.protocol import last_tag
from rollout.tasks.encyclopedia import encyclopedia_demonstrations, encyclopedia_tasks
from rollout.tasks.encyclopedia_world import make_encyclopedia, passages, split_of_entity
from rollout.tasks.splits import SPLITS
from rollout.teams.roles import ROLES, Role
from tests.support.demonstrations import make_demonstrations

SIZES = {"train": 400, "validation": 60, "test": 200}


def short_role(name: str, verb: str) -> Role:
    """Return a role whose prompt has nothing but the history and the question."""
    return replace(ROLES[name], system="", user="{history}" + verb + " {question}")


@pytest.fixture(scope="module")
def roles() -> dict[str, Role]:
    return {
        "verifier": short_role("search_verifier", "verify"),
        "searcher": short_role("searcher", "search"),
        "answerer": short_role("answerer", "answer"),
    }


def slug_of(task_id: str) -> str:
    """Return the part of a task's id that names the person."""
    return task_id.rsplit("/", 1)[1]


class TestWorld:
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_splits_share_no_person_and_no_home(self, seed: int) -> None:
        world = make_encyclopedia(seed)
        assert len({person.name for person in world.people}) == 2000
        assert len({town.name for town in world.towns}) == 480
        for split, other in combinations(SPLITS, 2):
            people = [person for person in world.people if person.split == split]
            others = [person for person in world.people if person.split == other]
            assert not {p.name for p in people} & {p.name for p in others}
            assert not {p.home.name for p in people} & {p.home.name for p in others}

    def test_a_name_has_the_same_split_in_every_world(self) -> None:
        first, second = (
            {person.name: person.split for person in make_encyclopedia(seed).people}
            for seed in (0, 1)
        )
        shared = first.keys() & second.keys()
        assert len(shared) > 100
        assert all(first[name] == second[name] == split_of_entity(name) for name in shared)

    def test_seeds_decide_the_world(self) -> None:
        assert passages(5) == passages(5)
        assert passages(5) != passages(6)


class TestTasks:
    @pytest.mark.parametrize("seed", [0, 7])
    def test_splits_ask_about_different_people(self, seed: int) -> None:
        tasks = encyclopedia_tasks(seed, SIZES)
        assert tasks == encyclopedia_tasks(seed, SIZES)
        assert len({task.id for task in tasks}) == len(tasks) == 660
        for split, other in combinations(SPLITS, 2):
            members = [task for task in tasks if task.split == split]
            others = [task for task in tasks if task.split == other]
            assert not {slug_of(t.id) for t in members} & {slug_of(t.id) for t in others}
            assert not {t.prompt for t in members} & {t.prompt for t in others}

    def test_half_of_the_questions_have_two_hops(self) -> None:
        tasks = encyclopedia_tasks(0, SIZES)
        assert Counter((task.split, task.source) for task in tasks) == {
            ("train", "one_hop"): 200,
            ("train", "two_hop"): 200,
            ("validation", "one_hop"): 30,
            ("validation", "two_hop"): 30,
            ("test", "one_hop"): 100,
            ("test", "two_hop"): 100,
        }

    def test_passages_tell_every_answer(self) -> None:
        text_of = {passage.title: passage.text for passage in passages(3)}
        person_of = {
            person.name.lower().replace(" ", "-"): person for person in make_encyclopedia(3).people
        }
        for task in encyclopedia_tasks(3, SIZES):
            person = person_of[slug_of(task.id)]
            answer = task.answers[0]
            assert person.home.name in text_of[person.name]
            if task.source == "one_hop":
                assert answer in text_of[person.name]
            else:
                assert answer in text_of[person.home.name]
                assert answer not in text_of[person.name]

    def test_more_tasks_than_there_are_is_an_error(self) -> None:
        message = "encyclopedia, one_hop: 50000 test tasks asked for, but there are 8"
        with pytest.raises(ValueError, match=message):
            encyclopedia_tasks(0, {"test": 100_000})


class TestSearchTeam:
    @pytest.mark.slow
    def test_turns_are_legal_and_name_only_training_entities(self, roles: dict[str, Role]) -> None:
        demonstrations = list(encyclopedia_demonstrations(0, 3000, roles=roles))
        assert len(demonstrations) == 3000
        texts = []
        for demonstration in demonstrations:
            prompt, reply = demonstration.messages
            assert prompt.role == "user"
            assert reply.role == "assistant"
            assert roles[demonstration.agent].parse(reply.content) is not None
            texts += [prompt.content, reply.content]
        all_text = "\n".join(texts)
        world = make_encyclopedia(0)
        for entity in (*world.people, *world.towns):
            if entity.split != "train":
                assert entity.name not in all_text

    def test_prompts_are_those_of_the_orchestra(self, roles: dict[str, Role]) -> None:
        """An answer to a two-hop question without slips has the history word for word."""
        prompt, reply = next(
            (demonstration.messages[0].content, demonstration.messages[1].content)
            for demonstration in encyclopedia_demonstrations(0, 500, roles=roles, slips={})
            if demonstration.agent == "answerer"
            and demonstration.messages[0].content.count("<search>") == 2
        )
        question = prompt.splitlines()[-1].removeprefix("answer ")
        name = question.rstrip("?").rpartition(" of ")[2]
        [person] = [person for person in make_encyclopedia(0).people if person.name == name]
        home = person.home
        assert prompt == (
            f"<search> {name} </search>\n"
            f"<information> {name} is a {person.trade} who lives in {home.name}. </information>\n"
            f"<search> {home.name} </search>\n"
            f"<information> {home.name} lies on the river {home.river} and sells {home.goods}. "
            "</information>\n"
            f"answer {question}"
        )
        fact = home.river if "river" in question else home.goods
        assert reply == f"<answer> {fact} </answer>"

    @pytest.mark.parametrize(
        ("options", "share"),
        [
            ({"slips": {}}, 0.0),
            ({"slips": {"searcher": 1.0, "answerer": 1.0}}, 0.0),
            ({}, 0.45),
            ({"slips": {"verifier": 1.0}}, 1.0),
        ],
    )
    def test_only_the_named_agents_slip(
        self, roles: dict[str, Role], options: dict[str, Any], share: float
    ) -> None:
        """Without a search the right verdict is no, so that every yes is a slip of the verifier."""
        verdicts = [
            demonstration.messages[-1].content
            for demonstration in encyclopedia_demonstrations(0, 2500, roles=roles, **options)
            if demonstration.agent == "verifier"
            and "<search>" not in demonstration.messages[0].content
        ]
        slips = verdicts.count("<verify>yes</verify>")
        tolerance = 0.0 if share in (0.0, 1.0) else 0.08
        assert slips / len(verdicts) == pytest.approx(share, abs=tolerance)


class TestMemoryTeam:
    def test_a_lead_that_never_slips_asks_its_scout_and_answers(self) -> None:
        demonstrations = make_demonstrations("demo_memory", 60, slips={}, episodes=30)
        leads = demonstrations[::2]
        scouts = demonstrations[1::2]
        assert {demonstration.agent for demonstration in leads} == {"lead"}
        assert {demonstration.agent for demonstration in scouts} == {"scout"}

        replies = [sum(message.role == "assistant" for message in lead.messages) for lead in leads]
        assert set(replies) == {2, 3}  # one or two questions, and the answer
        assert min(Counter(replies).values()) > 5
        for lead, scout in zip(leads, scouts, strict=True):
            report = scout.messages[-1].content
            answer = last_tag(lead.messages[-1].content, "answer")
            assert "<evidence>" in report
            assert answer
            assert answer in report

    @pytest.mark.slow
    def test_a_careless_lead_answers_too_early(self) -> None:
        demonstrations = make_demonstrations("demo_memory", 400, episodes=200)
        leads = [demonstration for demonstration in demonstrations if demonstration.agent == "lead"]
        early = sum(len(lead.messages) == 2 for lead in leads)
        assert 0.25 < early / len(leads) < 0.45  # the lead slips with probability 0.35
