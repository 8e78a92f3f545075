"""The encyclopedia: disjoint splits, answers that its passages tell, demonstrations that are rollouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest

from rollout.tasks.encyclopedia import (
    encyclopedia_demonstrations,
    encyclopedia_tasks,
    make_encyclopedia,
    passages,
    split_of_entity,
)
from rollout.teams.roles import ROLES, Role

SPLITS = ("train", "validation", "test")
SIZES = {"train": 400, "validation": 60, "test": 200}


def short(name: str, verb: str) -> Role:
    return replace(ROLES[name], system="", user="{history}" + verb + " {question}")


@pytest.fixture(scope="module")
def roles() -> dict[str, Role]:
    return {
        "verifier": short("search_verifier", "verify"),
        "searcher": short("searcher", "search"),
        "answerer": short("answerer", "answer"),
    }


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_splits_share_no_person_and_no_town(seed: int) -> None:
    world = make_encyclopedia(seed)
    names = {split: {p.name for p in world.people if p.split == split} for split in SPLITS}
    homes = {split: {p.home.name for p in world.people if p.split == split} for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        assert not names[one] & names[other]
        assert not homes[one] & homes[other]
    assert sum(map(len, names.values())) == len(world.people) == 2000
    assert len({town.name for town in world.towns}) == 480


@pytest.mark.parametrize("seed", [0, 7])
def test_tasks_of_two_splits_ask_about_nobody_in_common(seed: int) -> None:
    tasks = encyclopedia_tasks(seed, SIZES)
    people = {
        split: {task.id.rsplit("/", 1)[1] for task in tasks if task.split == split}
        for split in SPLITS
    }
    prompts = {split: {task.prompt for task in tasks if task.split == split} for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        assert not people[one] & people[other]
        assert not prompts[one] & prompts[other]
    assert len({task.id for task in tasks}) == len(tasks) == 660
    assert Counter((task.split, task.source) for task in tasks) == {
        ("train", "one_hop"): 200, ("train", "two_hop"): 200,
        ("validation", "one_hop"): 30, ("validation", "two_hop"): 30,
        ("test", "one_hop"): 100, ("test", "two_hop"): 100,
    }  # fmt: skip


def test_a_name_keeps_its_split_in_every_world() -> None:
    first, second = ({p.name: p.split for p in make_encyclopedia(seed).people} for seed in (0, 1))
    shared = first.keys() & second.keys()
    assert len(shared) > 100
    assert all(first[name] == second[name] == split_of_entity(name) for name in shared)


def test_passages_tell_every_answer() -> None:
    text = {entry.title: entry.text for entry in passages(3)}
    homes = {
        person.name.lower().replace(" ", "-"): person for person in make_encyclopedia(3).people
    }
    for task in encyclopedia_tasks(3, SIZES):
        person = homes[task.id.rsplit("/", 1)[1]]
        assert person.home.name in text[person.name]
        page = person.name if task.source == "one_hop" else person.home.name
        assert task.answers[0] in text[page]
        if task.source == "two_hop":
            assert task.answers[0] not in text[person.name]


def test_same_seed_same_world_another_seed_another() -> None:
    assert encyclopedia_tasks(5, SIZES) == encyclopedia_tasks(5, SIZES)
    assert passages(5) == passages(5)
    assert passages(5) != passages(6)


def test_sizes_are_checked() -> None:
    with pytest.raises(
        ValueError, match="encyclopedia, one_hop: 50000 test tasks asked for, but there are 8"
    ):
        encyclopedia_tasks(0, {"test": 100_000})


@pytest.mark.slow
def test_demonstrations_are_legal_and_about_train_only(roles: dict[str, Role]) -> None:
    shown = list(encyclopedia_demonstrations(0, 3000, roles=roles))
    assert len(shown) == 3000
    world = make_encyclopedia(0)
    others = {entity.name for entity in (*world.people, *world.towns) if entity.split != "train"}
    text = "\n".join(
        message.content for demonstration in shown for message in demonstration.messages
    )
    assert not [name for name in others if name in text]
    for demonstration in shown:
        assert [message.role for message in demonstration.messages] == ["user", "assistant"]
        assert roles[demonstration.agent].parse(demonstration.messages[-1].content) is not None


def test_demonstrations_read_as_rollouts(roles: dict[str, Role]) -> None:
    """Two-hop question, no slips: the prompts are those that the orchestra shows, word for word."""
    person = {p.name: p for p in make_encyclopedia(0).people}
    for shown in encyclopedia_demonstrations(0, 500, roles=roles, slips={}):
        if shown.agent == "answerer" and shown.messages[0].content.count("<search>") == 2:
            break
    prompt, reply = (message.content for message in shown.messages)
    question = prompt.splitlines()[-1].removeprefix("answer ")
    who = person[question.rstrip("?").rpartition(" of ")[2]]
    home = who.home
    assert prompt == (
        f"<search> {who.name} </search>\n"
        f"<information> {who.name} is a {who.trade} who lives in {home.name}. </information>\n"
        f"<search> {home.name} </search>\n"
        f"<information> {home.name} lies on the river {home.river} and sells {home.goods}. </information>\n"
        f"answer {question}"
    )
    assert reply == f"<answer> {home.river if 'river' in question else home.goods} </answer>"


def test_only_the_named_agents_slip(roles: dict[str, Role]) -> None:
    """With an empty history the right verdict is no, so the share of yes is the verifier's slips."""

    def hasty(**options: object) -> float:
        verdicts = [
            shown.messages[-1].content
            for shown in encyclopedia_demonstrations(0, 2500, roles=roles, **options)  # type: ignore[arg-type]
            if shown.agent == "verifier" and "<search>" not in shown.messages[0].content
        ]
        return verdicts.count("<verify>yes</verify>") / len(verdicts)

    assert hasty(slips={}) == 0.0
    assert hasty(slips={"searcher": 1.0, "answerer": 1.0}) == 0.0
    assert hasty() == pytest.approx(0.45, abs=0.08)
    assert hasty(slips={"verifier": 1.0}) == 1.0
