"""Trial of a model folder's chat template in a child process with little time and memory.

A template is a program. A loop without an end in it, or a text that grows without a bound, would
stop the process that renders it, whatever else that process does. Run as a script, this file is the
child; it imports jinja2 alone, so that a trial takes a fraction of a second.
"""

import json
import resource
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

_CPU_S = 3
_CLOCK_S = 60.0  # on a busy machine
_MEMORY_BYTES = 1 << 30
_MAX_TEXT = 10_000_000  # characters of a chat of a few words
_REFUSED = 3  # exit status of a child that has refused a template

_USER = {"role": "user", "content": "What is 1 + 1?"}
_SYSTEM = {"role": "system", "content": "Answer in one word."}
_REPLY = {"role": "assistant", "content": "<think>\nIt is easy.\n</think>\n\nTwo."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
_CHATS: list[dict[str, Any]] = [
    {"messages": [_USER]},
    {"messages": [_SYSTEM, _USER]},
    {"messages": [_USER, _REPLY, _USER, _REPLY, _USER, _REPLY, _USER]},
    {"messages": [_SYSTEM, _USER, _REPLY, _USER], "tools": [_TOOL]},
]


@lru_cache(maxsize=64)
def template_problem(template: str) -> str:
    """Return why a chat template cannot be used, or "".

    A child process renders four short chats. The template may refuse some of them, because some
    templates take no system message or no tools, but not all of them.
    """
    command = [sys.executable, "-I", str(Path(__file__).resolve())]
    try:
        child = subprocess.run(
            command,
            input=json.dumps(template).encode(),
            capture_output=True,
            check=False,
            timeout=_CLOCK_S,
        )
    except subprocess.TimeoutExpired:
        return f"it does not render four short chats within {_CLOCK_S:.0f} s"
    if child.returncode == 0:
        return ""
    if child.returncode == _REFUSED:
        return child.stdout.decode("utf-8", "replace").strip()
    return (
        f"it takes more than {_CPU_S} s or {_MEMORY_BYTES >> 20} MiB to render four short chats, or "
        f"crashes the process that renders them (status {child.returncode})"
    )


def _try_template(template: str) -> str:
    """Render all chats in this process; return the problem of the template, or ""."""
    import jinja2

    try:
        compiled = _environment().from_string(template)
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        return f"it is not a template ({_first_line(error)})"

    refusals = []
    variables = {"add_generation_prompt": True, "bos_token": "", "eos_token": ""}
    for chat in _CHATS:
        try:
            text = compiled.render(tools=chat.get("tools"), **variables, messages=chat["messages"])
        except jinja2.TemplateError as error:
            refusals.append(error)
            continue
        except MemoryError:
            raise
        except Exception as error:
            if chat is _CHATS[0]:
                return (
                    f"it cannot render one message of a user "
                    f"({type(error).__name__}: {_first_line(error)})"
                )
            continue
        if len(text) > _MAX_TEXT:
            return f"it renders {len(text)} characters for a chat of a few words"
    if len(refusals) == len(_CHATS):
        return f"it refuses every chat ({_first_line(refusals[0])})"
    return ""


def _environment() -> Any:
    """Return an environment with what transformers gives to chat templates."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Blocks that mark what the assistant has written; here they are rendered as they are."""

        tags = {"generation"}  # noqa: RUF012 (jinja declares it without ClassVar)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = time.strftime
    return environment


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _main() -> None:
    template = json.loads(sys.stdin.buffer.read())
    end_s = int(time.process_time()) + 1 + _CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (end_s, end_s))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    problem = _try_template(template)
    if problem:
        sys.stdout.buffer.write(problem.encode("utf-8", "replace"))
        sys.stdout.flush()
        sys.exit(_REFUSED)


if __name__ == "__main__":
    _main()
