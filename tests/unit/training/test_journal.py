"""A death costs what was being said, and nothing else: replies, tools and verdicts of before are on record."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json

from mcore_mas.runtime.stop_signal import Stopped
from mcore_mas.training.loop import train_steps
from mcore_mas.training.step import TrainingSession
from mcore_mas.training.weight_sync import WeightSync
from rollout.base.ownership import epoch_of, owned
from rollout.engines import PolicyReply
from rollout.records.files import read_trajectories
from rollout.records.trajectory import Completion, VersionSpan
from rollout.teams import journal as journals
from rollout.teams.journal import CollectionJournal
from tests.support.played import trajectory, turn
from tests.support.simulated import (
    TOKEN_S,
    Log,
    SimulatedEngine,
    engines_of,
    handed_over,
    simulated_run,
)
from tests.support.virtual_time import run_virtually

STEPS = 6
SETTINGS = [
    "trainer.tasks_per_step=4",
    "trainer.group_size=4",
    f"trainer.steps={STEPS}",
    "trainer.checkpoint_every=2",
    *(f"+policies.{policy}.max_in_flight=8" for policy in ("solver", "verifier")),
]


class Counting(SimulatedEngine):
    """Counts the tokens that it samples, and those of replies under way that it had not told of at a death."""

    sampled = lost = 0

    async def stream(self, prompt_ids: Any, sampling: Any, hear: Any) -> Any:
        began, told = asyncio.get_running_loop().time(), 0

        def heard(place: int, part: Any) -> bool:
            nonlocal told
            told = place + len(part.token_ids)
            return bool(hear(place, part))

        try:
            completion = await super().stream(prompt_ids, sampling, hear and heard)
        except asyncio.CancelledError:
            self.sampled += told
            self.lost += round((asyncio.get_running_loop().time() - began) / TOKEN_S) - told
            raise
        self.sampled += len(completion.token_ids)
        return completion


def session(
    folder: Path, staleness: int, *overrides: str, update_s: float = 20.0
) -> TrainingSession:
    """The run as a start finds it: from its newest checkpoint, or from nothing."""
    run = simulated_run(
        folder, *SETTINGS, f"+trainer.staleness={staleness}", *overrides, seconds=lambda _: update_s
    )
    for engine in engines_of(run).values():
        engine.__class__ = Counting
    found = run.checkpoints.newest(print)
    if found is None:
        return replace(run, rollouts=replace(run.rollouts, lineage={0: "start"}))
    for engine in engines_of(run).values():
        asyncio.run(engine.commit_update(handed_over(found.step)))
        engine._handed = [(0.0, found.step)]
    lineage = {int(version): own for version, own in found.state["lineage"].items()}
    syncs = {
        name: WeightSync(run.groups[name], engine, versions=found.state["versions"][name])  # type: ignore[arg-type]
        for name, engine in engines_of(run).items()
    }
    return replace(run, rollouts=replace(run.rollouts, lineage=lineage), weight_sync=syncs)


def train(run: TrainingSession, until_s: float = 1e9) -> bool:
    """Train to the end, or to a death at that time."""
    found = run.checkpoints.newest(print)

    async def main() -> bool:
        training = asyncio.ensure_future(train_steps(run, found.step if found else 0))
        done, _ = await asyncio.wait({training}, timeout=until_s)
        if done:
            training.result()
        else:
            training.cancel()
            await asyncio.wait({training})
        return bool(done)

    return run_virtually(main())


def played(folder: Path) -> list[Any]:
    return [
        t
        for step in range(STEPS)
        for t in read_trajectories(folder / "trajectories" / f"step_{step:06d}.parquet")
    ]


def tokens_of(folder: Path) -> int:
    return sum(len(turn.completion_ids) for t in played(folder) for turn in t.turns)


def sampled_by(*runs: TrainingSession) -> int:
    return sum(engine.sampled for run in runs for engine in engines_of(run).values())


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("share", [0.13, 0.5, 0.77])
def test_after_a_death_next_to_nothing_is_sampled_again_and_nothing_is_left_out(
    tmp_path: Path, staleness: int, share: float
) -> None:
    whole = session(tmp_path / "whole", staleness)
    ended: list[float] = []
    whole = replace(
        whole, logbook=Log(lambda step, metrics: ended.append(asyncio.get_running_loop().time()))
    )
    assert train(whole)
    assert sampled_by(whole) == tokens_of(tmp_path / "whole")

    first = session(tmp_path / "killed", staleness)
    assert not train(first, share * ended[-1])
    files = {
        path: path.read_bytes() for path in (tmp_path / "killed" / "trajectories").glob("*.parquet")
    }
    done = [path for path in files if '"complete":true' in journal_of(path).read_text()]
    second = session(tmp_path / "killed", staleness)
    assert train(second)
    for path in done:  # collected to the end: trained as it was
        assert path.read_bytes() == files[path]
    wanted = Counter(t.id for t in played(tmp_path / "whole"))
    assert Counter(t.id for t in played(tmp_path / "killed")) == wanted
    assert set(wanted.values()) == {1}
    tokens = tokens_of(tmp_path / "killed")
    assert sampled_by(first, second) == tokens  # no reply that had been finished was sampled twice
    lost = sum(engine.lost for engine in engines_of(first).values())
    print(f"staleness {staleness}: {lost} of {tokens} tokens sampled again")
    assert lost <= 0.02 * tokens
    if not staleness:
        assert played(tmp_path / "killed") == played(tmp_path / "whole")


@pytest.mark.parametrize("staleness", [1, 2])
def test_with_deterministic_neither_time_nor_a_death_decides_which_weights_sample_what(
    tmp_path: Path, staleness: int
) -> None:
    found = []
    for name, update_s in (("quick", 0.5), ("slow", 50.0), ("killed", 5.0)):
        own = ("+engine.deterministic=true",)
        if name == "killed":
            assert not train(session(tmp_path / name, staleness, *own, update_s=update_s), 70.0)
        assert train(session(tmp_path / name, staleness, *own, update_s=update_s))
        found.append(
            [
                (t.id, turn.seed, turn.versions, turn.text)
                for t in played(tmp_path / name)
                for turn in t.turns
            ]
        )
    quick, slow, killed = found
    assert quick == slow == killed
    version = {(int(id.split("/")[0]), versions) for id, _, versions, _ in quick}
    # all of a step by the weights that were there when it could begin: of step 5 at staleness 1 those after step 4
    assert {(step, *[span.version for span in spans]) for step, spans in version} == {
        (step, max(0, step - staleness)) for step in range(STEPS)
    }


def test_a_stop_while_weights_wait_leaves_the_rest_of_a_collection_to_them(tmp_path: Path) -> None:
    whole = session(tmp_path / "whole", 1, "+engine.deterministic=true", update_s=0.5)
    assert train(whole)
    first = session(tmp_path / "stopped", 1, "+engine.deterministic=true", update_s=0.5)

    async def until_stopped() -> None:
        asyncio.get_running_loop().call_later(60.0, first.stop.request)
        with pytest.raises(
            Stopped, match=r"^stopped by its caller; the same command goes on from the newest"
        ):
            await train_steps(first, 0)
        assert asyncio.get_running_loop().time() == pytest.approx(60.0)

    run_virtually(until_stopped())
    assert train(session(tmp_path / "stopped", 1, "+engine.deterministic=true", update_s=0.5))
    stopped, unbroken = (
        [(t.id, t.turns) for t in played(tmp_path / name)] for name in ("stopped", "whole")
    )
    assert stopped == unbroken


def journal_of(played: Path) -> Path:
    return played.parents[1] / "journal" / f"{played.stem}.jsonl"


def test_without_a_journal_the_step_is_played_again(tmp_path: Path) -> None:
    first = session(tmp_path, 0, "+collection.journal=false")
    assert not train(first, 60.0)
    second = session(tmp_path, 0, "+collection.journal=false")
    assert train(second)
    assert sampled_by(first, second) > tokens_of(tmp_path)


def test_other_weights_than_those_on_record_sample_anew(tmp_path: Path) -> None:
    first = session(tmp_path, 0)
    assert not train(first, 40.0)
    second = session(tmp_path, 0)
    second = replace(second, rollouts=replace(second.rollouts, lineage={0: "other weights"}))
    assert train(second)
    assert sampled_by(second) == tokens_of(tmp_path)


def test_a_file_of_trajectories_that_is_damaged_is_played_again(tmp_path: Path) -> None:
    whole = session(tmp_path, 0)
    assert train(whole)
    before = played(tmp_path)
    for checkpoint in (tmp_path / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    file = tmp_path / "trajectories" / "step_000003.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = session(tmp_path, 0)
    assert train(again)
    assert played(tmp_path) == before
    assert sampled_by(again) == sum(
        len(turn.completion_ids) for t in before if t.step >= 3 for turn in t.turns
    )


def test_experts_of_a_token_are_written_once_and_found_with_its_reply(tmp_path: Path) -> None:
    path, routing = tmp_path / "step_000000.jsonl", bytes(range(200, 248))
    span = VersionSpan(version=0, start=0, end=2)
    completion = Completion(
        token_ids=(3, 4),
        logprobs=(-0.5, -0.5),
        finish_reason="stop",
        versions=(span,),
        routing=routing,
    )
    turns = [turn(index, seed=index + 7, routing=routing if index else b"") for index in range(2)]
    played = trajectory(*turns)
    said = PolicyReply(text="x", prompt_ids=(1, 2), completion=completion)
    record = CollectionJournal(path, {0: "start"}).part("")
    record.keep_reply(8, (), said)
    record.keep(played)
    assert path.read_bytes().count(to_json(routing, bytes_mode="base64").strip(b'"=')) == 1
    again = CollectionJournal(path, {0: "start"}).part("")
    found = again.trajectory(played.id)
    assert found == played
    assert found is not None and [turn.routing for turn in found.turns] == [b"", routing]
    path.write_bytes(
        b"\n".join(line for line in path.read_bytes().split(b"\n") if b"reply 8" not in line)
    )
    assert (
        CollectionJournal(path, {0: "start"}).part("").trajectory(played.id) is None
    )  # it is played again


def test_torn_and_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = CollectionJournal(path, {3: "x"})
    for n in range(4):
        journal.add(f"row {n}", 3, n=n)
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2].replace(b'"n":1', b'"n":7')
    path.write_bytes(b"\n".join(lines)[:-20])  # a bit of row 1, the end of row 3
    journal = CollectionJournal(path, {3: "x"})
    journal.add("row 4", 3, n=4)
    rows = CollectionJournal(path, {3: "x"})
    assert [(rows.find(f"row {n}") or {}).get("n") for n in range(5)] == [0, None, 2, None, 4]
    assert rows.newest == 3
    assert [CollectionJournal(path, other).find("row 0") for other in ({3: "y"}, {2: "x"}, {})] == [
        None
    ] * 3


def test_rows_of_one_round_of_the_event_loop_are_written_together_and_answers_at_once(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.jsonl"

    def keys() -> list[str]:
        return [
            json.loads(line.partition(b" ")[2])["key"]
            for line in path.read_bytes().split(b"\n")
            if line
        ]

    async def play() -> None:
        journal = CollectionJournal(path, {3: "x"})
        for n in range(3):
            journal.add(f"row {n}", 3)
        assert not path.exists()
        await asyncio.sleep(0)
        assert keys() == ["row 0", "row 1", "row 2"]
        journal.add("row 3", 3)
        journal.part("").keep_answer("4", "sent")
        assert keys() == ["row 0", "row 1", "row 2", "row 3", "call 4"]
        journal.add("row 5", 3)
        await asyncio.sleep(0)
        assert keys()[5:] == ["row 5"]

    asyncio.run(play())


def test_a_journal_that_cannot_be_written_stops_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal").write_text("in the way")
    run = session(tmp_path, 0)
    assert train(run)
    said = [line for line in capfd.readouterr().err.splitlines() if "not written any more" in line]
    assert len(said) == STEPS
    assert said[0].startswith(f"{tmp_path}/journal/step_000000.jsonl: not written any more (")


def test_an_owner_that_has_lost_its_folder_appends_nothing_and_what_it_had_appended_late_does_not_count(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    with owned(tmp_path):
        journal, epoch = CollectionJournal(path, {3: "x"}), epoch_of(tmp_path)
        journal.add("row 0", 3)
        for number, later in enumerate(
            (epoch + 1, epoch, epoch + 1), 1
        ):  # of another owner, and of this one too late
            monkeypatch.setattr(journals, "epoch_of", lambda _, own=later: own)
            journal.add(f"row {number}", 3)
        (tmp_path / "lock.json").write_text(
            json.dumps({"host": "far", "pid": 7, "since": "now", "epoch": epoch + 1})
        )
        journal.add("row 4", 3)
        journal.add("row 5", 3)
    rows = CollectionJournal(path, {3: "x"})
    assert [rows.find(f"row {number}") is not None for number in range(6)] == [
        True,
        True,
        False,
        True,
        False,
        False,
    ]
    assert capfd.readouterr().err.splitlines() == [
        f"{path}: not written any more ({tmp_path}: taken over by process 7 on 'far' since now; this process, of epoch "
        f"{epoch}, writes no more); a run that is killed now plays this step again"
    ]
