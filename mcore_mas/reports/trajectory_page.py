"""A trajectory as a web page of its own: nothing is loaded, nothing runs, and what models wrote is only text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from rollout.records.trajectory import Message, Status, ToolEvent, Trajectory, Turn

Place = tuple[str, str, int]  # trajectory, node, turn
_LONG = 1200  # characters of a tool's result, from which it is folded
_HUES = 7  # agents that have a colour of their own

# Okabe and Ito's colours, lightened for dark pages; an agent's name stands beside its colour everywhere
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1a; --soft: #6b6b66; --line: #dcdbd5; --page: #fdfdfb; --quiet: #f4f3ee;
  --bad: #a03a12; --up: #00694f; --down: #a03a12;
  --a0: #0072b2; --a1: #b84a00; --a2: #00795a; --a3: #a8507f; --a4: #8a6400; --a5: #2b7fb0; --a6: #55554f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e5df; --soft: #9b9a93; --line: #3a3a37; --page: #191918;
  --quiet: #222221; --bad: #f0926b; --up: #5cc7a4; --down: #f0926b;
  --a0: #62b5e5; --a1: #f0926b; --a2: #5cc7a4; --a3: #dfa0c4; --a4: #e3b341; --a5: #8ccdf0; --a6: #b5b4ac; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 50rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { margin: 0; font-size: 1.35rem; font-weight: 600; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 1rem; font-weight: 600; }
.facts, .figures, .agents { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .4rem 0 0; padding: 0;
  list-style: none; color: var(--soft); font-size: .875rem; font-variant-numeric: tabular-nums; }
.facts b, .figures b { color: var(--ink); font-weight: 600; }
.agents { margin: 1rem 0 2rem; padding: .8rem 0; border: solid var(--line); border-width: 1px 0; }
.agents li::before { content: ""; display: inline-block; width: .65em; height: .65em; margin-right: .45em;
  border-radius: 2px; background: var(--hue); }
.error { margin: 1rem 0 0; color: var(--bad); overflow-wrap: anywhere; }
article { margin: 0 0 1.9rem; padding-left: 1rem; border-left: 3px solid var(--hue); }
article h2 { color: var(--hue); }
article h2 small { color: var(--soft); font-weight: 400; }
article.masked .said { color: var(--soft); }
pre { margin: .45rem 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .84rem/1.55 ui-monospace, monospace;
  unicode-bidi: isolate; }
.said { margin-top: .7rem; font-size: .9rem; }
.role { margin-top: .6rem; color: var(--soft); font-size: .75rem; }
.role + pre { margin-top: .15rem; }
.seen pre, .tool pre { padding: .6rem .8rem; background: var(--quiet); border-radius: 4px; }
.tool { margin: .8rem 0 0; font-size: .875rem; }
.tool code { font: .84rem ui-monospace, monospace; overflow-wrap: anywhere; }
.label { padding: 0 .45em; border: 1px solid currentColor; border-radius: 3px; color: var(--soft); font-size: .75rem;
  font-weight: 400; }
.label.bad, .facts .bad { color: var(--bad); }
summary { cursor: pointer; color: var(--soft); font-size: .875rem; }
.bar { display: inline-block; position: relative; width: 4rem; height: .6em; margin-left: .4em;
  background: linear-gradient(var(--soft), var(--soft)) center / 1px 100% no-repeat; }
.bar i { position: absolute; top: 1px; bottom: 1px; width: calc(var(--share) * 50%); border-radius: 1px; }
.bar .up { left: 50%; background: var(--up); }
.bar .down { right: 50%; background: var(--down); }
.branches { margin: 0 0 1.9rem 1rem; }
.branches section { margin: 1rem 0 0; padding-left: 1rem; border-left: 1px dashed var(--line); opacity: .85; }
@media (max-width: 34rem) { main { padding: 1.25rem .8rem 3rem; } article { padding-left: .7rem; }
  .branches { margin-left: 0; } .branches section { padding-left: .5rem; } }
@media print { main { max-width: none; padding: 0; } article { break-inside: avoid; } }
"""


def page(trajectory: Trajectory, advantages: Mapping[Place, float]) -> str:
    """The page of one trajectory; of a tree, with the branches that did not go on folded where they left the line."""
    agents = list(dict.fromkeys(turn.agent for turn in trajectory.turns))
    drawn = _Drawn(trajectory, advantages, {agent: f"var(--a{i % _HUES})" for i, agent in enumerate(agents)})
    title = _text(f"{trajectory.task_id} · {trajectory.id}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        # should an escape ever be missing, nothing that a model wrote may run or call out
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{_head(trajectory)}{drawn.legend()}{drawn.conversation()}</main>\n</body>\n</html>\n"
    )


class _Drawn:
    """A trajectory's turns as HTML, with what they share: colours and the scale of advantages."""

    def __init__(self, trajectory: Trajectory, advantages: Mapping[Place, float], hues: Mapping[str, str]) -> None:
        self._trajectory = trajectory
        self._hues = hues
        self._advantages = {
            (node, index): value for (of, node, index), value in advantages.items() if of == trajectory.id
        }
        self._largest = max((abs(value) for value in self._advantages.values()), default=0.0)

    def legend(self) -> str:
        """Who speaks, in which colour, as which policy."""
        rows = []
        for agent, hue in self._hues.items():
            own = [turn for turn in self._trajectory.turns if turn.agent == agent]
            policies = ", ".join(sorted({turn.policy for turn in own}))
            said = f"{len(own)} turn{'s' * (len(own) != 1)}"
            rows.append(f'<li style="--hue:{hue}">{_text(agent)}, playing {_text(policies)}, {said}</li>')
        return f'<ul class="agents">{"".join(rows)}</ul>\n' if rows else ""

    def conversation(self) -> str:
        """The turns in their order, and beside each node of a tree what was not chosen there."""
        by_node: dict[str, list[Turn]] = {}
        for turn in self._trajectory.turns:
            by_node.setdefault(turn.node, []).append(turn)
        path = list(dict.fromkeys(turn.node for turn in self._trajectory.path))
        parts = [self._events("", -1)]  # tools before anyone spoke
        for node in path:
            parts += [self._turn(turn, first=not i and node == path[0]) for i, turn in enumerate(by_node[node])]
            siblings = [other for other in by_node if other and other != node and _parent(other) == _parent(node)]
            if node and siblings:
                inner = "".join(self._branch(other, by_node[other]) for other in siblings)
                count = f"{len(siblings)} branch{'es' * (len(siblings) != 1)} that did not go on"
                parts.append(f'<details class="branches"><summary>{count}</summary>{inner}</details>\n')
        return "".join(parts)

    def _branch(self, node: str, turns: Sequence[Turn]) -> str:
        return f"<section>{''.join(self._turn(turn) for turn in turns)}</section>"

    def _turn(self, turn: Turn, *, first: bool = False) -> str:
        node = f" · branch {_text(turn.node)}" if turn.node else ""
        return (
            f'<article class="{"masked" if turn.masked else "turn"}" style="--hue:{self._hues[turn.agent]}">'
            f"<h2>{_text(turn.agent)} <small>turn {turn.index}{node}</small> {_labels(turn)}</h2>"
            f"{_seen(turn, unfolded=first)}"
            f'<pre class="said" dir="auto">{_text(turn.text) or "<em>nothing</em>"}</pre>'
            f"{self._figures(turn)}{self._events(turn.node, turn.index)}</article>\n"
        )

    def _figures(self, turn: Turn) -> str:
        figures = []
        if turn.reward is not None:
            figures.append(f"reward <b>{turn.reward:g}</b>")
        advantage = self._advantages.get((turn.node, turn.index))
        if advantage is not None:
            figures.append(f"advantage <b>{advantage:+.3g}</b>{self._bar(advantage)}")
        figures += [f"{_text(name)} {value:g}" for name, value in turn.scores.items()]
        figures.append(
            f"{len(turn.completion_ids)} token{'s' * (len(turn.completion_ids) != 1)}, log p {sum(turn.logprobs):.2f}"
        )
        figures.append(f"weights {_versions(turn)}")
        if turn.took_s:
            figures.append(f"{turn.took_s:.2g} s")
        return _list("figures", figures)

    def _bar(self, advantage: float) -> str:
        share = abs(advantage) / self._largest if self._largest else 0.0
        side = "up" if advantage >= 0 else "down"
        return f'<span class="bar" aria-hidden="true"><i class="{side}" style="--share:{share:.3f}"></i></span>'

    def _events(self, node: str, turn: int) -> str:
        return "".join(_tool(e) for e in self._trajectory.tools if (e.after_turn, e.node) == (turn, node))


def _head(trajectory: Trajectory) -> str:
    outcome = "none" if trajectory.outcome is None else f"{trajectory.outcome:g}"
    bad = "" if trajectory.status is Status.COMPLETED else ' class="bad"'
    facts = [
        f"<b{bad}>{trajectory.status.value}</b>",
        f"outcome <b>{outcome}</b>",
        *([f"answer <b>{_text(trajectory.answer)}</b>"] if trajectory.answer else []),
        f"{_text(trajectory.source)}, step {trajectory.step}, sample {trajectory.sample}",
        f"{len(trajectory.path)} turns" + (f" of {len(trajectory.turns)} in the tree" if trajectory.leaf else ""),
        *(f"{_text(name)} {value:g}" for name, value in trajectory.metrics.items()),
    ]
    error = f'<p class="error">{_text(trajectory.error)}</p>' if trajectory.error else ""
    return f"<header><h1>{_text(trajectory.task_id)}</h1>{_list('facts', facts)}{error}</header>\n"


def _seen(turn: Turn, *, unfolded: bool) -> str:
    """What the agent was shown."""
    if not turn.messages:
        return ""
    size = sum(len(message.content) for message in turn.messages)
    shown = "".join(_message(message) for message in turn.messages)
    what = f"what {_text(turn.agent)} was shown, {size} characters"
    return f'<details class="seen"{" open" * unfolded}><summary>{what}</summary>{shown}</details>'


def _message(message: Message) -> str:
    return f'<div class="role">{_text(message.role)}</div><pre dir="auto">{_text(message.content)}</pre>'


def _tool(event: ToolEvent) -> str:
    failed = ' <span class="label bad">failed</span>' if event.failed else ""
    took = f" in {event.took_s:.2g} s" if event.took_s else ""
    result = f'<pre dir="auto">{_text(event.result)}</pre>'
    if len(event.result) > _LONG:
        result = f"<details><summary>{len(event.result)} characters</summary>{result}</details>"
    query = (
        f'<pre dir="auto">{_text(event.query)}</pre>' if "\n" in event.query else f"<code>{_text(event.query)}</code>"
    )
    return f'<div class="tool"><b>{_text(event.tool)}</b>{took}{failed} {query}{result}</div>'


def _labels(turn: Turn) -> str:
    labels = [
        *(["masked"] if turn.masked else []),
        *(["malformed"] if not turn.valid else []),
        *(["cut off"] if turn.finish_reason == "length" else []),
    ]
    return " ".join(f'<span class="label{" bad" * (label != "masked")}">{label}</span>' for label in labels)


def _versions(turn: Turn) -> str:
    versions = [span.version for span in turn.versions] or [turn.policy_version]
    return f"v{versions[0]}" if len(versions) == 1 else f"v{versions[0]} to v{versions[-1]}"


def _list(kind: str, items: Iterable[str]) -> str:
    return f'<ul class="{kind}">{"".join(f"<li>{item}</li>" for item in items)}</ul>'


def _parent(node: str) -> str:
    return node.rpartition(".")[0]


def _text(text: str) -> str:
    """Text that is nothing but text: no markup, no control characters that a browser would drop or obey."""
    clean = text.encode("utf-8", "replace").decode()
    return escape("".join(c if c >= " " or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in clean), quote=True)
