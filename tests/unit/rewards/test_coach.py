"""Coach against a scripted server: scores, failures, cached replies and shared calls."""

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
    """Return the judged agent's output in a request to the coach's model."""
    prompt = body["messages"][1]["content"]
    pattern = r"\[agent output (\w+)\]\n(.*?)\n\[end of"
    return re.search(pattern, prompt, re.DOTALL).group(2)


def score(coach_config, folder, *batches):
    """Score the batches with a new coach.

    Returns:
        The scores of every turn of the last batch, by trajectory; the metrics; the coach.
    """

    async def run():
        async with aclosing(Coach(coach_config, folder)) as coach:
            for batch in batches:
                groups = await coach.score(batch)
            return groups, coach.metrics(), coach

    groups, metrics, coach = asyncio.run(run())
    scores = [
        [dict(turn.scores) for turn in trajectory.turns]
        for group in groups
        for trajectory in group.trajectories
    ]
    return scores, metrics, coach


def one_turn(text="x", agent="solver"):
    return [group(trajectory(turn(0, agent, text)))]


def by_length(body, _):
    """Reply with the length of the judged output as its score."""
    return says(f"Because.\nPROCESS_SCORE: {len(output_of(body))}\nOUTCOME_SCORE: 0.5")


def test_every_turn_of_completed_trajectories_is_scored(tmp_path) -> None:
    groups = [
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
        scores, metrics, _ = score(config(server.url), tmp_path, groups)
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


def test_other_scores_stay_and_only_named_agents_are_judged(tmp_path) -> None:
    groups = [
        group(trajectory(turn(0, "solver", "a", scores={"team": 1.0}), turn(1, "verifier", "b")))
    ]
    with chat_server(by_length) as server:
        scores, metrics, _ = score(config(server.url, agents=("solver",)), tmp_path, groups)
    assert scores == [[{"team": 1.0, "process": 1.0, "outcome": 0.5}, {}]]
    assert "coach/verifier/calls" not in metrics


def test_groups_without_trajectories_need_no_call(tmp_path) -> None:
    scores, metrics, _ = score(config("http://127.0.0.1:9/v1"), tmp_path, [group()])
    assert scores == []
    assert metrics["coach/spent_calls"] == 0.0


def test_429_is_waited_for_as_long_as_the_server_says(tmp_path) -> None:
    def script(body, number):
        if number == 0:
            return Response(status=429, headers={"Retry-After": "1"})
        return by_length(body, number)

    with chat_server(script) as server:
        scores, metrics, _ = score(config(server.url), tmp_path, one_turn())
    assert scores[0][0]["process"] == 1.0
    assert 1.0 <= server.times[1] - server.times[0] < 4.0
    assert metrics["coach/solver/calls"] == 2.0
    assert metrics["coach/solver/tokens"] == 15.0  # the refused call had none


def test_a_wait_past_the_deadline_fails_at_once_and_stops_all_calls(tmp_path) -> None:
    with chat_server(Response(status=429, headers={"Retry-After": "3600"})) as server:
        start = time.monotonic()
        scores, metrics, coach = score(config(server.url), tmp_path, one_turn("x"), one_turn("y"))
    assert time.monotonic() - start < 5.0
    assert scores == [[{}]]
    assert len(server.bodies) == 1  # the second batch does not call before that time
    assert metrics["coach/solver/failures"] == 2.0
    assert metrics["coach/failed_unavailable"] == 2.0
    assert "past the deadline" in coach.last_failure


def test_500_is_tried_again_and_then_leaves_no_score(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rollout.engines.remote.caller.CALL_BACKOFF_S", 0.01)

    def third_succeeds(body, number):
        return by_length(body, number) if number == 2 else Response(status=500)

    with chat_server(third_succeeds) as server:
        scores, _, _ = score(config(server.url), tmp_path / "a", one_turn())
    assert scores[0][0]["process"] == 1.0
    with chat_server(Response(b"boom", status=500)) as server:
        scores, metrics, coach = score(config(server.url), tmp_path / "b", one_turn())
    assert scores == [[{}]]
    assert len(server.bodies) == 3  # once, and 2 retries
    assert metrics["coach/failed_unavailable"] == 1.0
    assert coach.last_failure == "status 500: boom (after 3 calls)"


def test_bodies_without_a_completion_are_failures_of_the_server(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rollout.engines.remote.caller.CALL_BACKOFF_S", 0.01)
    garbage = [
        b"<html>busy</html>",
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"message": {"content": 7}}]}',
        b"\xff",
    ]
    with chat_server(lambda _, number: Response(garbage[number])) as server:
        scores, metrics, coach = score(config(server.url, retries=4), tmp_path, one_turn())
    assert scores == [[{}]]
    assert len(server.bodies) == 5
    assert metrics["coach/failed_unavailable"] == 1.0
    assert "not a chat completion" in coach.last_failure


def test_a_server_that_hangs_up_or_is_not_there(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rollout.engines.remote.caller.CALL_BACKOFF_S", 0.01)
    with chat_server(Response(hangs_up=True)) as server:
        scores, metrics, _ = score(config(server.url), tmp_path / "a", one_turn())
        closed_url = server.url
    assert scores == [[{}]]
    # Requests that were sent may be billed, so their largest cost is charged.
    assert metrics["coach/solver/tokens"] > 3 * 2048
    scores, metrics, _ = score(config(closed_url), tmp_path / "b", one_turn())
    assert scores == [[{}]]
    assert metrics["coach/solver/tokens"] == 0.0  # nothing was sent


def test_a_slow_server_meets_the_deadline(tmp_path) -> None:
    with chat_server(says("PROCESS_SCORE: 7", delay_s=30)) as server:
        start = time.monotonic()
        scores, metrics, coach = score(config(server.url, deadline_s=0.3), tmp_path, one_turn())
        took = time.monotonic() - start
    assert scores == [[{}]]
    assert took < 5.0
    assert metrics["coach/failed_deadline"] == 1.0
    assert coach.last_failure == "no verdict within 0.3 s"


def test_a_call_and_a_batch_have_deadlines_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("rollout.engines.remote.caller.CALL_BACKOFF_S", 0.01)
    slow_once = [says("PROCESS_SCORE: 7", delay_s=30), says("PROCESS_SCORE: 7")]
    with chat_server(lambda _, number: slow_once[number]) as server:
        scores, _, _ = score(config(server.url, timeout_s=0.3), tmp_path / "a", one_turn())
    assert scores == [[{"process": 7.0}]]
    groups = [
        group(
            trajectory(
                turn(0, "solver", "quick"), turn(1, "solver", "slow"), turn(2, "solver", "queued")
            )
        )
    ]

    def script(body, _):
        return says("PROCESS_SCORE: 7", delay_s=0 if output_of(body) == "quick" else 30)

    with chat_server(script) as server:
        scores, metrics, _ = score(
            config(server.url, batch_deadline_s=0.7, concurrency=1), tmp_path / "b", groups
        )
    assert scores == [[{"process": 7.0}, {}, {}]]
    assert metrics["coach/failed_deadline"] == 2.0


def test_a_malformed_verdict_is_asked_for_once_more(tmp_path) -> None:
    replies = [says("Seven, I think."), says("PROCESS_SCORE: 7")]
    with chat_server(lambda _, number: replies[number]) as server:
        scores, metrics, _ = score(config(server.url), tmp_path / "a", one_turn())
    assert scores == [[{"process": 7.0}]]
    assert [message["role"] for message in server.bodies[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert server.bodies[1]["messages"][2]["content"] == "Seven, I think."
    with chat_server(says("Seven.")) as server:
        scores, metrics, coach = score(config(server.url), tmp_path / "b", one_turn())
        again, _, _ = score(config(server.url), tmp_path / "b", one_turn())
    assert scores == again == [[{}]]
    assert len(server.bodies) == 2  # also a bad reply is paid for once
    assert metrics["coach/failed_malformed"] == 1.0
    assert coach.last_failure == "no line PROCESS_SCORE, also when asked again"


def test_a_verdict_without_an_answer_of_the_coach_is_asked_for_once_more(tmp_path) -> None:
    replies = [says("PROCESS_SCORE: 9"), says("OWN_ANSWER: 42\nPROCESS_SCORE: 2")]
    with chat_server(lambda _, number: replies[number]) as server:
        answering = config(server.url, form="answer_first")
        scores, _, _ = score(answering, tmp_path / "a", one_turn("41"))
    assert scores == [[{"process": 2.0}]]
    request = server.bodies[1]["messages"][3]["content"]
    assert "cannot be read: no line OWN_ANSWER with a result." in request
    with chat_server(says("PROCESS_SCORE: 9")) as server:
        answering = config(server.url, form="answer_first")
        scores, metrics, _ = score(answering, tmp_path / "b", one_turn("41"))
    assert (scores, metrics["coach/failed_malformed"]) == ([[{}]], 1.0)


def test_a_refusal_is_malformed_and_a_refused_prompt_is_not_asked_again(tmp_path) -> None:
    with chat_server(says(None)) as server:
        scores, metrics, _ = score(config(server.url), tmp_path / "a", one_turn())
    assert (scores, metrics["coach/failed_malformed"]) == ([[{}]], 1.0)
    assert server.bodies[1]["messages"][2]["content"] == "(nothing)"
    with chat_server(Response(b"too long", status=400)) as server:
        scores, metrics, _ = score(config(server.url), tmp_path / "b", one_turn())
    assert (scores, metrics["coach/failed_refused"], len(server.bodies)) == ([[{}]], 1.0, 1)


def test_the_fallback_score_is_given_and_still_counts_as_a_failure(
    tmp_path,
) -> None:
    with chat_server(says("Seven.")) as server:
        scores, metrics, _ = score(config(server.url, fallback=5.0), tmp_path, one_turn())
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
def test_errors_that_no_retry_can_mend_stop_at_once(tmp_path, status, body) -> None:
    groups = [group(trajectory(*(turn(i, "solver", "x" * i) for i in range(20))))]
    headers = {"Location": "http://127.0.0.1:9/v1/chat/completions"} if status == 307 else {}
    with chat_server(Response(body, status=status, headers=headers)) as server:
        with pytest.raises(RemoteError, match=f"openai 'judge': status {status}"):
            score(config(server.url, concurrency=2), tmp_path, groups)
        assert len(server.bodies) <= 4


def test_replies_are_cached_across_starts(tmp_path) -> None:
    with chat_server(by_length) as server:
        first, _, _ = score(config(server.url), tmp_path, one_turn("abc"))
        other_url = config(server.url.replace("127.0.0.1", "localhost"))
        again, metrics, _ = score(other_url, tmp_path, one_turn("abc"))
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
            score(config(server.url, **other), tmp_path, one_turn("abc"))
    assert len(server.bodies) == 5
    assert server.bodies[-1]["logprobs"] is True


def test_equal_questions_in_flight_are_one_call(tmp_path) -> None:
    same = [group(trajectory(turn(0, "solver", "x")), trajectory(turn(0, "solver", "x")))]
    with chat_server(says("PROCESS_SCORE: 4", delay_s=0.2)) as server:
        scores, metrics, _ = score(config(server.url), tmp_path, same * 2)
    assert scores == [[{"process": 4.0}]] * 4
    assert len(server.bodies) == 1
    assert metrics["coach/solver/calls"] == 1.0
    assert metrics["coach/solver/cache_hits"] == 3.0


def test_a_cancelled_caller_does_not_cancel_the_shared_call(tmp_path) -> None:
    async def run(url):
        async with aclosing(Coach(config(url), tmp_path)) as coach:
            cancelled = asyncio.create_task(coach.score(one_turn()))
            waiting = asyncio.create_task(coach.score(one_turn()))
            await asyncio.sleep(0.1)
            cancelled.cancel()
            groups = await waiting
            return groups[0].trajectories[0].turns[0].scores

    with chat_server(says("PROCESS_SCORE: 4", delay_s=0.3)) as server:
        assert asyncio.run(run(server.url)) == {"process": 4.0}
    assert len(server.bodies) == 1


def test_text_with_unpaired_surrogates_is_sent_and_cached(tmp_path) -> None:
    with chat_server(says("\ud800 PROCESS\nPROCESS_SCORE: 4")) as server:
        first, _, _ = score(config(server.url), tmp_path, one_turn("half \ud83d"))
        again, _, _ = score(config(server.url), tmp_path, one_turn("half \ud83d"))
    assert first == again == [[{"process": 4.0}]]
    assert output_of(server.bodies[0]) == "half \ufffd"
    assert len(server.bodies) == 1


def test_concurrency_is_bounded(tmp_path) -> None:
    groups = [group(trajectory(*(turn(i, "solver", f"{i}") for i in range(12))))]
    with chat_server(says("PROCESS_SCORE: 4", delay_s=0.05)) as server:
        scores, _, _ = score(config(server.url, concurrency=3), tmp_path, groups)
    assert scores == [[{"process": 4.0}] * 12]
    assert server.busiest == 3


def test_one_coach_serves_one_event_loop_after_another(tmp_path) -> None:
    with chat_server(by_length) as server:
        coach = Coach(config(server.url), tmp_path)
        for size in (1, 2):
            [group] = asyncio.run(coach.score(one_turn("x" * size)))
            assert group.trajectories[0].turns[0].scores["process"] == size
        asyncio.run(coach.aclose())


def test_a_folder_has_one_owner(tmp_path) -> None:
    async def run():
        async with aclosing(Coach(config("http://127.0.0.1:9/v1"), tmp_path)):
            with pytest.raises(RemoteError, match="is another process using it"):
                Coach(config("http://127.0.0.1:9/v1"), tmp_path)

    asyncio.run(run())


def test_an_exhausted_budget_stops_the_run_or_masks(tmp_path) -> None:
    groups = [group(trajectory(*(turn(i, "solver", f"{i}") for i in range(6))))]
    with chat_server(by_length) as server:
        with pytest.raises(
            BudgetExhausted, match=r"5 calls would pass the limit of 4; raise coach\.budget"
        ):
            score(config(server.url, budget={"calls": 4}), tmp_path, groups)
        assert len(server.bodies) == 4
        more = config(server.url, budget={"calls": 5}, when_exhausted="mask")
        scores, metrics, _ = score(more, tmp_path, groups)
    assert len(server.bodies) == 5  # four came from the cache
    assert sum("process" in turn for turn in scores[0]) == 5
    assert metrics["coach/failed_budget"] == 1.0
    assert metrics["coach/spent_calls"] == 5.0


def test_reading_the_metrics_resets_them(tmp_path) -> None:
    async def run(url):
        priced = config(url, prices={"prompt": 2.0, "reply": 10.0})
        async with aclosing(Coach(priced, tmp_path)) as coach:
            await coach.score(one_turn())
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


def test_turns_of_frozen_agents_are_not_judged(tmp_path) -> None:
    groups = [group(trajectory(turn(0, "solver", "a"), turn(1, "friend", "b", masked=True)))]
    with chat_server(by_length) as server:
        scores, _, _ = score(config(server.url), tmp_path, groups)
    assert [turn.get("process") for turn in scores[0]] == [1.0, None]
    assert len(server.bodies) == 1
