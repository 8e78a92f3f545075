"""Prompt of the coach: the material of one turn between unforgeable markers, and the form of the verdict."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rollout.base.text import truncate_middle
from rollout.base.yaml_files import read_yaml
from rollout.records.trajectory import Message, Task, ToolEvent, Trajectory, Turn
from rollout.rewards.coach_config import CoachConfig

# Tool name of the events that `Episode.files` records; their result lists the files of the work folder,
# one per line.
FILES_TOOL = "files"

_TEXTS: Mapping[str, str] = read_yaml(Path(__file__).with_suffix(".yaml"))


def coach_messages(
    task: Task, trajectory: Trajectory, turn: Turn, config: CoachConfig
) -> tuple[Message, ...]:
    """Return the messages that request a verdict on a turn."""
    material = _between_markers(_sections(task, trajectory, turn, config))
    requests = [_TEXTS["answer_first" if requires_own_answer(turn, config) else "grade"]]
    requests += _further_score_lines(turn, config)
    form = "\n".join(requests)
    return (
        Message(role="system", content=_TEXTS["system"]),
        Message(role="user", content=f"{material}\n\n{form}"),
    )


def requires_own_answer(turn: Turn, config: CoachConfig) -> bool:
    """Return True if the coach must do the turn's task itself before it grades the turn.

    A judge without a reference rewards outputs that only look right, and a policy learns to write
    them. The judge's own result serves as a reference (arXiv 2607.05904). A turn that is judged with
    the ground truth has a better one.
    """
    return config.form == "answer_first" and turn.agent not in config.judged_with_answer


def _further_score_lines(turn: Turn, config: CoachConfig) -> list[str]:
    """Return the prompt's lines that request scores in addition to the process score."""
    lines = []
    if config.outcome:
        lines.append(_TEXTS["outcome"])
    if turn.agent in config.judged_with_answer:
        lines.append(_TEXTS["correct"])
    return lines


def repair_messages(
    messages: Sequence[Message], reply: str, problem: str, *, turn: Turn, config: CoachConfig
) -> tuple[Message, ...]:
    """Return the messages that request the verdict again, after a reply that could not be parsed.

    Args:
        messages: messages that requested the verdict on `turn`.
        reply: reply that could not be parsed.
        problem: the reason.
        turn: turn that is judged.
        config: config of the coach.
    """
    lines = [_TEXTS["repair"].format(problem=problem)]
    if requires_own_answer(turn, config):
        lines.append(_TEXTS["own_answer"])
    lines.append(_TEXTS["process"])
    lines += _further_score_lines(turn, config)
    return (
        *messages,
        # Vendors refuse empty messages.
        Message(role="assistant", content=reply or "(nothing)"),
        Message(role="user", content="\n".join(lines)),
    )


def _sections(
    task: Task, trajectory: Trajectory, turn: Turn, config: CoachConfig
) -> list[tuple[str, str]]:
    """Return the material of a turn as pairs of section name and text."""
    events = [event for event in trajectory.tools if _is_visible(event, turn)]
    tool_calls = [event for event in events if event.tool != FILES_TOOL]
    files_before = _listed_files(events, turn.index - 1)
    files_after = _listed_files(events, turn.index)
    agent_input = "\n\n".join(f"{message.role}: {message.text}" for message in turn.messages)

    sections = [
        ("problem", truncate_middle(task.prompt, config.text_chars)),
        ("agent", turn.agent),
        ("agent input", truncate_middle(agent_input, config.text_chars)),
    ]
    if files_before:
        listing = truncate_middle(files_before, config.observation_chars)
        sections.append(("files left by earlier turns", listing))
    for event in tool_calls:
        if event.after_turn < turn.index:
            sections.append(("earlier tool result", _format_event(event, config.earlier_chars)))
    sections.append(("agent output", truncate_middle(turn.text, config.text_chars) or "(nothing)"))
    if turn.finish_reason == "length":
        sections.append(("note", "the output was cut off at the agent's limit of tokens"))
    for event in tool_calls:
        if event.after_turn == turn.index:
            sections.append(("tool result", _format_event(event, config.observation_chars)))
    if files_after and files_after != files_before:
        listing = truncate_middle(files_after, config.observation_chars)
        sections.append(("files after the action", listing))
    if turn.agent in config.judged_with_answer:
        answers = "\n".join(task.answers)
        sections.append(("ground truth", truncate_middle(answers, config.text_chars)))
    if turn.agent in config.metrics_for:
        metrics = {"outcome": trajectory.outcome or 0.0, **trajectory.metrics}
        lines = "\n".join(f"{name}: {value:.6g}" for name, value in metrics.items())
        sections.append(("measured at the end", lines))
    return sections


def _is_visible(event: ToolEvent, turn: Turn) -> bool:
    """Return True if a tool event happened on the turn's path in the tree, up to and including the turn."""
    is_on_path = not event.node or f"{turn.node}.".startswith(f"{event.node}.")
    return is_on_path and event.after_turn <= turn.index


def _listed_files(events: Iterable[ToolEvent], last_turn_index: int) -> str:
    """Return the latest listing of the work folder up to the end of a turn; "" if there is none."""
    listings = [
        event.result
        for event in events
        if event.tool == FILES_TOOL and event.after_turn <= last_turn_index
    ]
    return listings[-1] if listings else ""


def _format_event(event: ToolEvent, limit: int) -> str:
    """Return the text of a tool call, with at most `limit` characters of its query and of its result."""
    query = truncate_middle(event.query, limit)
    result = truncate_middle(event.result, limit)
    return f"{event.tool}: {query}\n{result}"


def _between_markers(sections: Sequence[tuple[str, str]]) -> str:
    """Join the sections, each between two markers with a digest of all texts.

    An agent cannot know the digest while it writes, because the digest depends on the whole of its
    text, so it cannot forge the end of its section. (A program that searches for a text that
    contains its own digest needs about 2^48 tries.)
    """
    material = "\x1f".join(text for _, text in sections).encode(errors="surrogatepass")
    digest = hashlib.blake2b(material, digest_size=6).hexdigest()
    return "\n\n".join(
        f"[{name} {digest}]\n{text}\n[end of {name} {digest}]" for name, text in sections
    )
