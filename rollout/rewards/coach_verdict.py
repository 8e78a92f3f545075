"""Parser of a coach's verdict: lines such as `PROCESS_SCORE: 7` anywhere in a reply."""

import math
import re


class MalformedVerdict(ValueError):
    """Error in a reply without a usable score; the message names the line and its problem."""


# Name in a reply -> (name in the turn's scores, highest value); the lowest value is 0.
_SCORES = {
    "PROCESS_SCORE": ("process", 10.0),
    "OUTCOME_SCORE": ("outcome", 1.0),
    "ANSWER_CORRECT": ("answer_correct", 1.0),
}
# A line "NAME: value" or "NAME = value", with or without Markdown around the name.
_SCORE_LINE = re.compile(rf"^[ \t>*_`#-]*({'|'.join(_SCORES)})[*_` \t]*[:=](.*)$", re.MULTILINE)
# The line of the coach's own result, which must not be empty.
_ANSWER_LINE = re.compile(r"^[ \t>*_`#-]*OWN_ANSWER[*_` \t]*[:=].*[^\s*_`]", re.MULTILINE)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def parse_verdict(reply: str, *, require_own_answer: bool = False) -> dict[str, float]:
    """Parse the scores of a verdict; process and outcome scores are clamped to their ranges.

    Text in a thought is ignored: all up to the last `</think>`, and all from a `<think>` after it that
    is not closed. A reply may have `</think>` alone, because some chat templates put `<think>` into the
    prompt. A name may occur twice if its value is the same.

    Args:
        reply: text of the coach.
        require_own_answer: require a line OWN_ANSWER with the coach's own solution of the task,
            before the first score.

    Returns:
        `process` from 0 (harmful) to 10 (as good as an expert), and, if the reply has them,
        `outcome` from 0 to 1 and `answer_correct`, 0 or 1.

    Raises:
        MalformedVerdict: the process score is missing, a required line OWN_ANSWER is missing or comes
            after a score, a value is not a finite number, ANSWER_CORRECT is neither 0 nor 1, or two
            values of a name differ.
    """
    visible_reply = reply.rpartition("</think>")[2].partition("<think>")[0]
    values: dict[str, str] = {}
    for name, text in _SCORE_LINE.findall(visible_reply):
        value = text.strip(" \t\r*_`").removesuffix(".")
        if values.setdefault(name, value) != value:
            raise MalformedVerdict(f"{name} is both {values[name]!r} and {value!r}")
    if "PROCESS_SCORE" not in values:
        raise MalformedVerdict("no line PROCESS_SCORE")
    if require_own_answer:
        _check_answer_comes_first(visible_reply)
    if values.get("ANSWER_CORRECT") not in (None, "0", "1"):
        raise MalformedVerdict(
            f"ANSWER_CORRECT is {values['ANSWER_CORRECT'][:40]!r}, expected 0 or 1"
        )
    # Models often write "7/10".
    values["PROCESS_SCORE"] = re.sub(r"\s*/\s*10$", "", values["PROCESS_SCORE"])
    return {
        key: _parse_score(name, values[name], highest)
        for name, (key, highest) in _SCORES.items()
        if name in values
    }


def _check_answer_comes_first(visible_reply: str) -> None:
    """Raise MalformedVerdict if no line OWN_ANSWER with a text precedes the first score."""
    answer = _ANSWER_LINE.search(visible_reply)
    score = _SCORE_LINE.search(visible_reply)
    if answer is None:
        raise MalformedVerdict("no line OWN_ANSWER with a result")
    if score is not None and score.start() < answer.start():
        raise MalformedVerdict(f"the line OWN_ANSWER comes after {score.group(1)}, expected before")


def _parse_score(name: str, text: str, highest: float) -> float:
    """Return a score, clamped to [0, highest]; raise MalformedVerdict if it is not a finite number."""
    if not _NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        raise MalformedVerdict(f"{name} is {text[:40]!r}, expected a number from 0 to {highest:g}")
    return min(max(float(text), 0.0), highest)
