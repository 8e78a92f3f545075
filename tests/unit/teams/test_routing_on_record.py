"""The experts that a mixture's tokens went to survive a death, and a trajectory that is played again."""

import base64
from dataclasses import replace
from pathlib import Path

from rollout.engines import PolicyReply
from rollout.records.trajectory import Completion, Message, Task, VersionSpan
from rollout.teams.journal import CollectionJournal, Quarantined, write_quarantined
from tests.unit.records.test_records import TRAJECTORIES

EVERY_BYTE = bytes(range(256))
COMPLETION = Completion(
    token_ids=(8, 2),
    logprobs=(-0.5, -0.25),
    finish_reason="stop",
    versions=(VersionSpan(version=3, start=0, end=2),),
    routing=EVERY_BYTE,
)
REPLY = PolicyReply(text="t", prompt_ids=(5, 6, 7), completion=COMPLETION)
ASKED = (Message(role="user", content="u"),)


def test_a_journal_has_them_of_replies_and_of_trajectories(tmp_path: Path) -> None:
    trajectory = replace(
        TRAJECTORIES[0], turns=(replace(TRAJECTORIES[0].turns[0], routing=EVERY_BYTE),)
    )
    written = CollectionJournal(tmp_path / "journal", {3: "w"}).part("")
    seed = trajectory.turns[0].seed
    written.keep(trajectory)  # whose reply is not on record
    assert (
        CollectionJournal(tmp_path / "journal", {3: "w"}).part("").trajectory(trajectory.id) is None
    )
    written.keep_reply(seed, ASKED, REPLY)
    read = CollectionJournal(tmp_path / "journal", {3: "w"}).part("")
    assert read.reply(seed, ASKED) == REPLY
    assert read.trajectory(trajectory.id) == trajectory
    assert (tmp_path / "journal").read_text().count(
        base64.urlsafe_b64encode(EVERY_BYTE).decode()
    ) == 1


def test_a_quarantined_trajectory_has_them(tmp_path: Path) -> None:
    task = Task(id="t", prompt="p", answers=("1",), env="math", source="s", split="train")
    path = write_quarantined(
        tmp_path, TRAJECTORIES[0], task, 1, {7: (ASKED, REPLY)}, ValueError("x")
    )
    assert Quarantined.read(path).said == {7: REPLY}
