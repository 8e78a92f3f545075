"""Chat with a team: it plays the tasks that a person types, one after the other."""

from collections.abc import Generator, Iterable
from dataclasses import replace

from mcore_mas.config.run import RunConfig
from mcore_mas.evaluation.running_team import running_team
from mcore_mas.evaluation.seats import config_with_seats
from mcore_mas.evaluation.unscored_env import UNKNOWN_ANSWERS, UnscoredEnv
from rollout.records.trajectory import CHAT_STEP, Task, Trajectory


def converse(
    config: RunConfig, state: str, prompts: Iterable[str]
) -> Generator[Trajectory, None, None]:
    """Yield the team's trajectory for each prompt, without outcome and scores.

    Args:
        config: config of the run.
        state: "base" or "trained".
        prompts: tasks; the next one is read after the trajectory of the last was yielded.

    Raises:
        ConfigError: there is no such state; raised before a prompt is read.
        FolderError: the training has not finished; raised before a prompt is read.
        PlacementError: there are fewer GPUs than the engines need.
    """
    return _play_prompts(config_with_seats(config, state), prompts)


def _play_prompts(config: RunConfig, prompts: Iterable[str]) -> Generator[Trajectory, None, None]:
    with running_team(config, f"{config.folder}/chat-", CHAT_STEP) as team:
        make_env = team.collector.make_env
        collector = replace(team.collector, make_env=lambda task: UnscoredEnv(make_env(task)))
        for number, prompt in enumerate(prompts):
            task = Task(
                id=f"chat-{number}",
                prompt=prompt,
                answers=UNKNOWN_ANSWERS,
                env=config.env.name,
                source="chat",
                split="",
            )
            trajectory = team.runner.run(collector.play(task, 0))
            # Nobody knows the right answer, so scores would be wrong.
            turns = tuple(replace(turn, scores={}) for turn in trajectory.turns)
            yield replace(trajectory, outcome=None, turns=turns)
