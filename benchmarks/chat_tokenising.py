"""Share of a chat's generation time that its prompts cost in tokenising, and how long they hold up the event loop.

A turn samples 100 tokens, a call of a tool, and reads a result of 150. Generation is counted at 100 tokens a second,
which a chat rarely gets from a large model; tokenising is the CPU time of making all 128 prompts.
"""

import asyncio
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a checkout, installed or not

from mcore_mas.pipeline.base_model import make_tiny_model
from rollout.engines import ChatState, EngineClient
from rollout.models.chat_template import Renderer
from rollout.models.tool_calls import ToolSchema
from rollout.records.trajectory import Message, Sampling, Turn
from tests.support.played import turn
from tests.support.scripted_engine import ScriptedEngine
from tests.support.templates import QWEN25

TURNS, SAMPLED, RATE, CHATS, REPEATS, GOAL = 128, 100, 100.0, 16, 3, 2.0
SEARCH = ToolSchema(
    name="search", description="Search.", parameters={"type": "object", "properties": {}}
)
OPENING = (
    Message(role="system", content="You search."),
    Message(role="user", content="How many coins? " * 60),
)
RESULT = "Ada has 12 coins and sells 7 cups. " * 10


def reply(renderer: Renderer) -> tuple[str, tuple[int, ...]]:
    """A reply of about SAMPLED tokens, and those."""
    ask = "how many coins are left "
    text = ""
    while len(renderer.encode(text)) < SAMPLED:
        text, ask = (
            f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{ask}"}}}}\n</tool_call>',
            ask * 2,
        )
    return text, renderer.encode_reply(text)


async def chat(client: EngineClient, raw: str) -> float:
    """CPU seconds of the prompts of one chat."""
    messages, before, spent = OPENING, None, 0.0
    for index in range(TURNS):
        began = time.process_time()
        said = await client.say(
            messages, Sampling(max_tokens=400), ChatState(id="c", tools=(SEARCH,), before=before)
        )
        spent += time.process_time() - began
        assert said.root is False
        before = as_turn(index, said.prompt_ids, said.completion.token_ids, messages)
        answered = Message(role="tool", content=RESULT, answers="0")
        messages = (*messages, Message(role="assistant", content="", raw=raw), answered)
    return spent


def as_turn(
    index: int, prompt: tuple[int, ...], completion: tuple[int, ...], messages: tuple[Message, ...]
) -> Turn:
    """The turn as the next prompt needs it."""
    return turn(index, prompt_ids=prompt, completion_ids=completion, messages=messages)


async def delays(client: EngineClient, raw: str) -> list[float]:
    """Milliseconds by which the event loop is late, while CHATS chats go on at once."""
    late = []
    chats = asyncio.gather(*(chat(client, raw) for _ in range(CHATS)))
    while not chats.done():
        began = time.perf_counter()
        await asyncio.sleep(0.005)
        late.append((time.perf_counter() - began - 0.005) * 1e3)
    await chats
    return late


def main() -> None:
    """Takes the median of several chats."""
    with TemporaryDirectory() as folder:
        model = Path(folder) / "Qwen2"
        make_tiny_model(model)
        (model / "chat_template.jinja").write_text(QWEN25)
        renderer = Renderer(model)
        raw, ids = reply(renderer)
        client = EngineClient(engine=ScriptedEngine(lambda prompt, call: ids), renderer=renderer)
        spent = [asyncio.run(chat(client, raw)) for _ in range(REPEATS)]
        late = asyncio.run(delays(client, raw))
    share = 100 * statistics.median(spent) / (TURNS * len(ids) / RATE)
    print(
        f"{len(ids)} tokens a reply; prompts of a chat: {', '.join(f'{s:.2f}' for s in spent)} s of CPU"
    )
    print(
        f"{CHATS} chats at once: event loop late by {statistics.quantiles(late, n=100)[98]:.1f} ms (p99)"
    )
    print(
        f"name=chat_tokenising ratio={share:.2f} at_most={GOAL:.2f} reference=percent_of_generation_time n={REPEATS}"
    )


if __name__ == "__main__":
    main()
