"""CPU time of tokenizing a chat's prompts as a share of its generation time, and delays of the event loop.

A turn samples about 100 tokens, a tool call, and reads a result of 150. Generation is counted at 100
tokens per second, which a chat rarely gets from a large model.
"""

import asyncio
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.support.result import print_result
from mcore_mas.pipeline.base_model import make_tiny_model
from rollout.engines import ChatState, EngineClient
from rollout.models.chat_template import Renderer
from rollout.models.tool_calls import ToolSchema
from rollout.records.trajectory import Message, Sampling
from tests.support.played import turn
from tests.support.scripted_engine import ScriptedEngine
from tests.support.templates import QWEN25

TURNS = 128
REPLY_TOKENS = 100
TOKENS_PER_S = 100.0
CHATS = 16
REPEATS = 3
GOAL = 2.0  # percent
SLEEP_S = 0.005
SEARCH = ToolSchema(
    name="search", description="Search.", parameters={"type": "object", "properties": {}}
)
OPENING = (
    Message(role="system", content="You search."),
    Message(role="user", content="How many coins? " * 60),
)
RESULT = "Ada has 12 coins and sells 7 cups. " * 10


def make_reply(renderer: Renderer) -> tuple[str, tuple[int, ...]]:
    """Return a tool call of at least REPLY_TOKENS tokens, as text and as token ids."""
    query = "how many coins are left "
    text = ""
    while len(renderer.encode(text)) < REPLY_TOKENS:
        text = (
            f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{query}"}}}}\n</tool_call>'
        )
        query += query
    return text, renderer.encode_reply(text)


async def hold_chat(client: EngineClient, reply_text: str) -> float:
    """Hold one chat of TURNS turns; return the CPU seconds of its prompts."""
    messages = OPENING
    previous_turn = None
    cpu_s = 0.0
    for index in range(TURNS):
        began = time.process_time()
        reply = await client.say(
            messages,
            Sampling(max_tokens=400),
            ChatState(id="c", tools=(SEARCH,), before=previous_turn),
        )
        cpu_s += time.process_time() - began
        assert reply.root is False
        previous_turn = turn(
            index,
            prompt_ids=reply.prompt_ids,
            completion_ids=reply.completion.token_ids,
            messages=messages,
        )
        call = Message(role="assistant", content="", raw=reply_text)
        result = Message(role="tool", content=RESULT, answers="0")
        messages = (*messages, call, result)
    return cpu_s


async def measure_delays(client: EngineClient, reply_text: str) -> list[float]:
    """Hold CHATS concurrent chats; return the delays of the event loop in ms."""
    delays_ms = []
    chats = asyncio.gather(*(hold_chat(client, reply_text) for _ in range(CHATS)))
    while not chats.done():
        began = time.perf_counter()
        await asyncio.sleep(SLEEP_S)
        delays_ms.append((time.perf_counter() - began - SLEEP_S) * 1e3)
    await chats
    return delays_ms


def main() -> None:
    """Measure several chats; the result is their median."""
    with TemporaryDirectory() as folder:
        model = Path(folder) / "Qwen2"
        make_tiny_model(model)
        (model / "chat_template.jinja").write_text(QWEN25)
        renderer = Renderer(model)
        reply_text, reply_ids = make_reply(renderer)
        engine = ScriptedEngine(lambda prompt, call: reply_ids)
        client = EngineClient(engine=engine, renderer=renderer)
        cpu_times = [asyncio.run(hold_chat(client, reply_text)) for _ in range(REPEATS)]
        delays_ms = asyncio.run(measure_delays(client, reply_text))
    generation_s = TURNS * len(reply_ids) / TOKENS_PER_S
    percent = 100 * statistics.median(cpu_times) / generation_s
    shown_times = ", ".join(f"{cpu_s:.2f}" for cpu_s in cpu_times)
    p99_ms = statistics.quantiles(delays_ms, n=100)[98]
    print(f"{len(reply_ids)} tokens a reply; prompts of a chat: {shown_times} s of CPU")
    print(f"{CHATS} concurrent chats: event loop late by {p99_ms:.1f} ms (p99)")
    print_result(
        "chat_tokenizing",
        percent,
        goal=GOAL,
        at_most=True,
        reference="percent_of_generation_time",
        repeats=REPEATS,
    )


if __name__ == "__main__":
    main()
