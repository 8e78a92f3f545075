"""A coach against a real server: scores, failures that leave no score, caching, one call for equal questions."""

import asyncio
import json
import re
import time
from contextlib import aclosing

import pytest

from rollout.engines.remote import RemoteError
from rollout.engines.remote.ledger import BudgetExhausted
from rollout.records.trajectory import Status
from rollout.rewards.coach import Coach
from tests.support.chat_server import Response, chat_server, says
from tests.support.coached import config, group, trajectory, turn


def output_of(body) -> str:
    """What the judged agent wrote."""
    return re.search(
        r"\[agent output (\w+)\]\n(.*?)\n\[end of", body["messages"][1]["content"], re.DOTALL
    ).group(2)


def scored(coach_config, folder, *batches):
    """The scores of every turn after the last of `batches`, and the coach's metrics over them all."""

    async def run():
        async with aclosing(Coach(coach_config, folder)) as coach:
            for batch in batches:
                groups = await coach.score(batch)
            return groups, coach.metrics(), coach

    groups, metrics, coach = asyncio.run(run())
    return (
        [[dict(t.scores) for t in one.turns] for g in groups for one in g.trajectories],
        metrics,
        coach,
    )


def one(text="x", agent="solver"):
    return [group(trajectory(turn(0, agent, text)))]


def by_length(body, _):
    return says(f"Because.\nPROCESS_SCORE: {len(output_of(body))}\nOUTCOME_SCORE: 0.5")


def test_every_turn_of_completed_trajectories_is_scored_in_its_place(tmp_path) -> None:
    played = [
        group(
            trajectory(turn(0, "solver", "a"), turn(1, "verifier", "bb")),
            trajectory(turn(0, "solver", "ccc")),
        ),
        group(
            trajectory(turn(0, "solver", "dddd"), status=Status.FAILED),
            trajectory(turn(0, "solver", "eeeee")),
        ),
    ]
    with chat_server(by_length) as server:
        scores, metrics, _ = scored(config(server.url), tmp_path, played)
    expected = [[1.0, 2.0], [3.0], [None], [5.0]]
    assert [[turn.get("process") for turn in turns] for turns in scores] == expected
    assert scores[0][0] == {"process": 1.0, "outcome": 0.5}
    assert scores[2] == [{}]
    assert len(server.bodies) == 4
    assert server.bodies[0]["model"] == "judge"
    assert server.bodies[0]["temperature"] == 0.0
    assert metrics["coach/solver/calls"] == 3.0
    assert metrics["coach/solver/process_mean"] == 3.0  # (1 + 3 + 5) / 3
    assert metrics["coach/verifier/calls"] == 1.0
    assert metrics["coach/solver/tokens"] == 45.0  # 3 x (10 + 5)
    assert metrics["coach/solver/failures"] == 0.0
    assert 0.0 < metrics["coach/solver/latency_s"] < 5.0


def test_scores_that_were_there_stay_and_only_named_agents_are_judged(tmp_path) -> None:
    played = [
        group(trajectory(turn(0, "solver", "a", scores={"team": 1.0}), turn(1, "verifier", "b")))
    ]
    with chat_server(by_length) as server:
        scores, metrics, _ = scored(config(server.url, agents=("solver",)), tmp_path, played)
    assert scores == [[{"team": 1.0, "process": 1.0, "outcome": 0.5}, {}]]
    assert "coach/verifier/calls" not in metrics


def test_nothing_to_judge(tmp_path) -> None:
    scores, metrics, _ = scored(config("http://127.0.0.1:9/v1"), tmp_path, [group()])
    assert scores == []
    assert metrics["coach/spent_calls"] == 0.0


def test_429_is_waited_for_as_long_as_the_server_says(tmp_path) -> None:
    def script(body, number):
        return (
            Response(status=429, headers={"Retry-After": "1"})
            if number == 0
            else by_length(body, number)
        )

    with chat_server(script) as server:
        scores, metrics, _ = scored(config(server.url), tmp_path, one())
    assert scores[0][0]["process"] == 1.0
    assert 1.0 <= server.times[1] - server.times[0] < 4.0
    assert metrics["coach/solver/calls"] == 2.0
    assert metrics["coach/solver/tokens"] == 15.0  # the refused call had none


def test_a_wait_past_the_deadline_is_not_begun_and_holds_back_everybody(tmp_path) -> None:
    with chat_server(Response(status=429, headers={"Retry-After": "3600"})) as server:
        start = time.monotonic()
        scores, metrics, coach = scored(config(server.url), tmp_path, one("x"), one("y"))
    assert time.monotonic() - start < 5.0
    assert scores == [[{}]]
    assert len(server.bodies) == 1  # the second batch knows that it is too early
    assert metrics["coach/solver/failures"] == 2.0
    assert metrics["coach/failed_unavailable"] == 2.0
    assert "past the deadline" in coach.last_failure


def test_500_is_tried_again_and_then_leaves_no_score(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rollout.engines.remote.caller.CALL_BACKOFF_S", 0.01)
    with chat_server(
        lambda body, n: by_length(body, n) if n == 2 else Response(status=500)
    ) as server:
        scores, _, _ = scored(config(server.url), tmp_path / "a", one())
    assert scores[0][0]["process"] == 1.0
    with chat_server(Response(b"boom", status=500)) as server:
        scores, metrics, coach = scored(config(server.url), tmp_path / "b", one())
    assert scores == [[{}]]
    assert len(server.bodies) == 3  # once, and 2 retries
    assert metrics["coach/failed_unavailable"] == 1.0
    assert coach.last_failure == "status 500: boom (after 3 calls)"


def test_bodies_that_are_no_completion_are_failures_of_the_server(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rollout.engines.remote.caller.CALL_BACKOFF_S", 0.01)
    garbage = [
        b"<html>busy</html>",
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"message": {"content": 7}}]}',
        b"\xff",
    ]
    with chat_server(lambda _, number: Response(garbage[number])) as server:
        scores, metrics, coach = scored(config(server.url, retries=4), tmp_path, one())
    assert scores == [[{}]]
    assert len(server.bodies) == 5
    assert metrics["coach/failed_unavailable"] == 1.0
    assert "no chat completion" in coach.last_failure


def test_a_server_that_hangs_up_or_is_not_there(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rollout.engines.remote.caller.CALL_BACKOFF_S", 0.01)
    with chat_server(Response(hangs_up=True)) as server:
        scores, metrics, _ = scored(config(server.url), tmp_path / "a", one())
        gone = server.url
    assert scores == [[{}]]
    assert (
        metrics["coach/solver/tokens"] > 3 * 1024
    )  # what was sent may have been billed: the worst is charged
    scores, metrics, _ = scored(config(gone), tmp_path / "b", one())
    assert scores == [[{}]]
    assert metrics["coach/solver/tokens"] == 0.0  # nothing was sent


def test_a_slow_server_meets_the_deadline(tmp_path) -> None:
    with chat_server(says("PROCESS_SCORE: 7", delay_s=30)) as server:
        start = time.monotonic()
        scores, metrics, coach = scored(config(server.url, deadline_s=0.3), tmp_path, one())
        took = time.monotonic() - start
    assert scores == [[{}]]
    assert took < 5.0
    assert metrics["coach/failed_deadline"] == 1.0
    assert coach.last_failure == "no verdict within 0.3 s"


def test_a_call_and_a_batch_have_deadlines_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rollout.engines.remote.caller.CALL_BACKOFF_S", 0.01)
    slow_once = [says("PROCESS_SCORE: 7", delay_s=30), says("PROCESS_SCORE: 7")]
    with chat_server(lambda _, number: slow_once[number]) as server:
        scores, _, _ = scored(config(server.url, timeout_s=0.3), tmp_path / "a", one())
    assert scores == [[{"process": 7.0}]]
    played = [
        group(
            trajectory(
                turn(0, "solver", "quick"), turn(1, "solver", "slow"), turn(2, "solver", "queued")
            )
        )
    ]

    def script(body, _):
        return says("PROCESS_SCORE: 7", delay_s=0 if output_of(body) == "quick" else 30)

    with chat_server(script) as server:
        scores, metrics, _ = scored(
            config(server.url, batch_deadline_s=0.7, concurrency=1), tmp_path / "b", played
        )
    assert scores == [[{"process": 7.0}, {}, {}]]
    assert metrics["coach/failed_deadline"] == 2.0


def test_a_malformed_verdict_is_asked_for_once_more(tmp_path) -> None:
    replies = [says("Seven, I think."), says("PROCESS_SCORE: 7")]
    with chat_server(lambda _, number: replies[number]) as server:
        scores, metrics, _ = scored(config(server.url), tmp_path / "a", one())
    assert scores == [[{"process": 7.0}]]
    assert [message["role"] for message in server.bodies[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert server.bodies[1]["messages"][2]["content"] == "Seven, I think."
    with chat_server(says("Seven.")) as server:
        scores, metrics, coach = scored(config(server.url), tmp_path / "b", one())
        again, _, _ = scored(config(server.url), tmp_path / "b", one())
    assert scores == again == [[{}]]
    assert len(server.bodies) == 2  # also a bad reply is paid for once
    assert metrics["coach/failed_malformed"] == 1.0
    assert coach.last_failure == "no line PROCESS_SCORE, also when asked again"


def test_a_refusal_is_malformed_and_a_refused_prompt_is_not_asked_again(tmp_path) -> None:
    with chat_server(says(None)) as server:
        scores, metrics, _ = scored(config(server.url), tmp_path / "a", one())
    assert (scores, metrics["coach/failed_malformed"]) == ([[{}]], 1.0)
    assert server.bodies[1]["messages"][2]["content"] == "(nothing)"
    with chat_server(Response(b"too long", status=400)) as server:
        scores, metrics, _ = scored(config(server.url), tmp_path / "b", one())
    assert (scores, metrics["coach/failed_refused"], len(server.bodies)) == ([[{}]], 1.0, 1)


def test_the_neutral_score_of_the_released_system_is_a_setting_and_still_a_failure(
    tmp_path,
) -> None:
    with chat_server(says("Seven.")) as server:
        scores, metrics, _ = scored(config(server.url, fallback=5.0), tmp_path, one())
    assert scores == [[{"process": 5.0}]]
    assert metrics["coach/solver/failures"] == 1.0
    assert "coach/solver/process_mean" not in metrics


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, b"bad key"),
        (403, b""),
        (404, b"no model"),
        (429, b'{"error": {"code": "insufficient_quota"}}'),
        (307, b""),
    ],
)
def test_what_no_retry_can_mend_stops_at_once(tmp_path, status, body) -> None:
    played = [group(trajectory(*(turn(i, "solver", "x" * i) for i in range(20))))]
    headers = {"Location": "http://127.0.0.1:9/v1/chat/completions"} if status == 307 else {}
    with chat_server(Response(body, status=status, headers=headers)) as server:
        with pytest.raises(RemoteError, match=f"openai 'judge': status {status}"):
            scored(config(server.url, concurrency=2), tmp_path, played)
        assert len(server.bodies) <= 4


def test_replies_are_kept_across_starts(tmp_path) -> None:
    with chat_server(by_length) as server:
        first, _, _ = scored(config(server.url), tmp_path, one("abc"))
        port_may_change = config(server.url.replace("127.0.0.1", "localhost"))
        again, metrics, _ = scored(port_may_change, tmp_path, one("abc"))
        assert first == again == [[{"process": 3.0, "outcome": 0.5}]]
        assert len(server.bodies) == 1
        assert metrics["coach/solver/cache_hits"] == 1.0
        assert metrics["coach/solver/calls"] == 0.0
        assert metrics["coach/spent_calls"] == 1.0
        for other in (
            {"model": "other"},
            {"temperature": 0.5},
            {"max_tokens": 7},
            {"request": {"logprobs": True}},
        ):
            scored(config(server.url, **other), tmp_path, one("abc"))
    assert len(server.bodies) == 5
    assert server.bodies[-1]["logprobs"] is True


def test_equal_questions_in_flight_are_one_call(tmp_path) -> None:
    same = [group(trajectory(turn(0, "solver", "x")), trajectory(turn(0, "solver", "x")))]
    with chat_server(says("PROCESS_SCORE: 4", delay_s=0.2)) as server:
        scores, metrics, _ = scored(config(server.url), tmp_path, same * 2)
    assert scores == [[{"process": 4.0}]] * 4
    assert len(server.bodies) == 1
    assert metrics["coach/solver/calls"] == 1.0
    assert metrics["coach/solver/cache_hits"] == 3.0


def test_who_leaves_does_not_take_the_shared_call_along(tmp_path) -> None:
    async def run(url):
        async with aclosing(Coach(config(url), tmp_path)) as coach:
            leaves, stays = (
                asyncio.create_task(coach.score(one())),
                asyncio.create_task(coach.score(one())),
            )
            await asyncio.sleep(0.1)
            leaves.cancel()
            return (await stays)[0].trajectories[0].turns[0].scores

    with chat_server(says("PROCESS_SCORE: 4", delay_s=0.3)) as server:
        assert asyncio.run(run(server.url)) == {"process": 4.0}
    assert len(server.bodies) == 1


def test_text_that_utf8_cannot_say_is_sent_and_kept(tmp_path) -> None:
    with chat_server(says("\ud800 PROCESS\nPROCESS_SCORE: 4")) as server:
        first, _, _ = scored(config(server.url), tmp_path, one("half \ud83d"))
        again, _, _ = scored(config(server.url), tmp_path, one("half \ud83d"))
    assert first == again == [[{"process": 4.0}]]
    assert output_of(server.bodies[0]) == "half \ufffd"
    assert len(server.bodies) == 1


def test_concurrency_is_bounded(tmp_path) -> None:
    played = [group(trajectory(*(turn(i, "solver", f"{i}") for i in range(12))))]
    with chat_server(says("PROCESS_SCORE: 4", delay_s=0.05)) as server:
        scores, _, _ = scored(config(server.url, concurrency=3), tmp_path, played)
    assert scores == [[{"process": 4.0}] * 12]
    assert server.busiest == 3


def test_one_coach_serves_one_event_loop_after_another(tmp_path) -> None:
    with chat_server(by_length) as server:
        coach = Coach(config(server.url), tmp_path)
        found = [
            asyncio.run(coach.score(one("x" * n)))[0].trajectories[0].turns[0].scores["process"]
            for n in (1, 2)
        ]
        asyncio.run(coach.aclose())
    assert found == [1.0, 2.0]


def test_a_folder_has_one_owner(tmp_path) -> None:
    async def run():
        async with aclosing(Coach(config("http://127.0.0.1:9/v1"), tmp_path)):
            with pytest.raises(RemoteError, match="is another process using it"):
                Coach(config("http://127.0.0.1:9/v1"), tmp_path)

    asyncio.run(run())


def test_an_exhausted_budget_stops_the_run_or_masks(tmp_path) -> None:
    played = [group(trajectory(*(turn(i, "solver", f"{i}") for i in range(6))))]
    with chat_server(by_length) as server:
        with pytest.raises(
            BudgetExhausted, match=r"5 calls would pass the limit of 4; raise coach\.budget"
        ):
            scored(config(server.url, budget={"calls": 4}), tmp_path, played)
        assert len(server.bodies) == 4
        more = config(server.url, budget={"calls": 5}, when_exhausted="mask")
        scores, metrics, _ = scored(more, tmp_path, played)
    assert len(server.bodies) == 5  # four came from the cache
    assert sum("process" in turn for turn in scores[0]) == 5
    assert metrics["coach/failed_budget"] == 1.0
    assert metrics["coach/spent_calls"] == 5.0


def test_metrics_start_anew_after_each_reading(tmp_path) -> None:
    async def run(url):
        async with aclosing(
            Coach(config(url, prices={"prompt": 2.0, "reply": 10.0}), tmp_path)
        ) as coach:
            await coach.score(one())
            return coach.metrics(), coach.metrics()

    with chat_server(by_length) as server:
        first, second = asyncio.run(run(server.url))
    assert first["coach/solver/cost"] == pytest.approx(70e-6)  # (10 x 2 + 5 x 10) / 1e6
    assert second == {
        "coach/spent_calls": 1.0,
        "coach/spent_tokens": 15.0,
        "coach/spent_cost": pytest.approx(70e-6),
    }
    assert json.dumps(first)


def test_a_frozen_agents_turns_are_not_judged(tmp_path) -> None:
    played = [group(trajectory(turn(0, "solver", "a"), turn(1, "friend", "b", masked=True)))]
    with chat_server(by_length) as server:
        scores, _, _ = scored(config(server.url), tmp_path, played)
    assert [turn.get("process") for turn in scores[0]] == [1.0, None]
    assert len(server.bodies) == 1
