"""Renderer: template arguments, tokens that end a reply, base models, and the cache of prompts."""

import asyncio
import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.runtime.players import make_renderers
from rollout.base.errors import ModelError
from rollout.engines import EngineClient
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Completion, Message, Sampling
from tests.support.templates import byte_tokenizer, renderer_of

SYSTEM = Message(role="system", content="S")
USER = Message(role="user", content="U")
PROMPT = (SYSTEM, USER)
DIALOGUE = (
    SYSTEM,
    USER,
    Message(role="assistant", content="A"),
    USER,
    Message(role="assistant", content="B"),
)

# As in Qwen3's template, an empty thought at the start of the reply switches thoughts off.
SWITCHABLE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
RENDERED_PROMPT = (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_OF_TEXT = 256
IM_END = 258
A = 32  # id of the byte "A"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a tokenizer of bytes that ends at <|im_end|>, without a chat template."""
    return byte_tokenizer(tmp_path, SPECIAL_TOKENS, eos_token="<|im_end|>")


def write_template(folder: Path, template: str = SWITCHABLE_TEMPLATE) -> Path:
    """Give a model folder a chat template."""
    (folder / "chat_template.jinja").write_text(template)
    return folder


def set_end_of_text(folder: Path, token: str) -> None:
    """Change the token that the tokenizer names as its end of text."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), eos_token=token)
    tokenizer.save_pretrained(str(folder))


def written_by_assistant(renderer: Renderer) -> str:
    """Return the text that the assistant wrote in DIALOGUE, with its ends of replies."""
    ids, is_reply = renderer.tokenize_dialogue(DIALOGUE)
    reply_ids = [token for token, written in zip(ids, is_reply, strict=True) if written]
    return renderer.decode_prompt(reply_ids)


def test_a_template_gets_its_arguments(folder: Path) -> None:
    write_template(folder)
    with_thoughts = Renderer(folder)
    without_thoughts = Renderer(folder, arguments={"enable_thinking": False})
    assert with_thoughts.decode_prompt(with_thoughts.render(PROMPT)) == RENDERED_PROMPT

    prompt_ids = without_thoughts.render(PROMPT)
    assert without_thoughts.decode_prompt(prompt_ids) == RENDERED_PROMPT + EMPTY_THOUGHT
    ids, is_reply = without_thoughts.tokenize_dialogue(DIALOGUE[:3])
    expected = f"{RENDERED_PROMPT}{EMPTY_THOUGHT}A<|im_end|>"
    assert without_thoughts.decode_prompt(ids) == expected
    assert sum(is_reply) == len((A, IM_END))


def test_an_argument_that_the_template_does_not_use_is_refused(folder: Path) -> None:
    write_template(folder)
    with pytest.raises(ModelError) as caught:
        Renderer(folder, arguments={"enable_thinkng": False})
    assert str(caught.value) == (
        f"{folder}: the chat template does not use 'enable_thinkng'; remove it from "
        "chat_template_kwargs"
    )


def test_a_prompt_without_tools_is_rendered_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = Renderer(folder, template="plain")
    rendered_lengths: list[int] = []
    apply_chat_template = PreTrainedTokenizerFast.apply_chat_template

    def apply_and_count(
        tokenizer: PreTrainedTokenizerFast, chat: list[object], **options: object
    ) -> object:
        rendered_lengths.append(len(chat))
        return apply_chat_template(tokenizer, chat, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", apply_and_count)
    question = Message(role="user", content="2 + 2?")
    answer = Message(role="assistant", content="4")
    other_question = Message(role="user", content="2 + 3?")

    prompts = {renderer.render([question]) for _ in range(8)}
    assert rendered_lengths == [1]
    (prompt,) = prompts

    assert renderer.render([other_question]) != prompt
    longer_prompt = renderer.render([question, answer, other_question])
    assert longer_prompt[: len(prompt)] == prompt
    assert rendered_lengths == [1, 1, 3]


def test_a_prompt_behind_a_context_begins_with_one_start_of_text(tmp_path: Path) -> None:
    renderer = renderer_of("llama3", tmp_path)
    prompt_ids = renderer.render([USER])
    prompt = renderer.decode_raw(prompt_ids)
    start = "<|begin_of_text|>"
    assert prompt.startswith(start)
    context = f"{start}<|start_header_id|>system<|end_header_id|>\n\nC<|eot_id|>"
    token_ids = renderer.prepend_context("C", prompt_ids)
    assert renderer.decode_raw(token_ids) == context + prompt.removeprefix(start)


def test_a_template_with_the_time_is_rendered_anew(folder: Path) -> None:
    write_template(
        folder, "{{ strftime_now('%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    renderer = Renderer(folder)
    assert len({renderer.render([USER]) for _ in range(20)}) > 1


@pytest.mark.parametrize(
    ("generation_config", "stop"),
    [
        (None, (IM_END,)),
        ({"eos_token_id": END_OF_TEXT}, (IM_END, END_OF_TEXT)),
        ({"eos_token_id": [IM_END, END_OF_TEXT]}, (IM_END, END_OF_TEXT)),
        ({"temperature": 0.6}, (IM_END,)),
    ],
)
def test_every_end_in_the_generation_config_ends_a_reply(
    folder: Path, generation_config: object, stop: tuple[int, ...]
) -> None:
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    renderer = Renderer(write_template(folder))
    requests: list[Sampling] = []

    class Engine:
        async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> Completion:
            requests.append(sampling)
            return Completion(
                token_ids=(A, stop[-1]), logprobs=(0.0, 0.0), finish_reason="stop", versions=()
            )

    client = EngineClient(engine=Engine(), renderer=renderer)  # type: ignore[arg-type]
    reply = asyncio.run(client.say(PROMPT, Sampling()))
    assert requests[0].stop == renderer.stop == stop
    assert reply.text == "A"
    assert renderer.encode_reply("A") == (A, IM_END)  # the first end is written


def test_a_model_without_a_template_needs_the_name_of_one(folder: Path) -> None:
    with pytest.raises(ModelError) as caught:
        Renderer(folder)
    assert str(caught.value) == (
        f"{folder}: a base model without a chat template; set chat_template to one of plain, chatml, "
        "or take the instruct model"
    )

    plain = Renderer(folder, template="plain")
    prompt = "### system\nS\n\n### user\nU\n\n### assistant\n"
    assert plain.decode_prompt(plain.render(PROMPT)) == prompt
    ids, _ = plain.tokenize_dialogue(DIALOGUE)
    assert plain.decode_prompt(ids) == (
        f"{prompt}A<|im_end|>\n\n### user\nU\n\n### assistant\nB<|im_end|>"
    )
    assert written_by_assistant(plain) == "A<|im_end|>B<|im_end|>"


def test_a_template_by_name_ends_a_reply_as_it_ends_a_turn(folder: Path) -> None:
    """The tokenizer of a base model names another end; both end a reply, the template's is written."""
    set_end_of_text(folder, "<|endoftext|>")
    chatml = Renderer(folder, template="chatml")
    plain = Renderer(folder, template="plain")
    assert chatml.stop == (IM_END, END_OF_TEXT)
    assert plain.stop == (END_OF_TEXT,)
    assert chatml.encode_reply("A") == (A, IM_END)
    assert plain.encode_reply("A") == (A, END_OF_TEXT)

    ids, _ = chatml.tokenize_dialogue(DIALOGUE)
    assert chatml.decode_prompt(ids) == (
        f"{RENDERED_PROMPT}A<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
        "B<|im_end|>"
    )
    assert written_by_assistant(chatml) == "A<|im_end|>B<|im_end|>"


def test_a_template_by_name_needs_its_end_of_a_turn_in_the_tokenizer(folder: Path) -> None:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|end|>"]
    byte_tokenizer(folder, tokens, eos_token="<|endoftext|>")
    with pytest.raises(ModelError) as caught:
        Renderer(folder, template="chatml")
    assert str(caught.value) == (
        f"{folder}: the tokenizer has no <|im_end|>, which ends a turn of chat_template chatml; set "
        "chat_template to plain"
    )


def test_the_end_of_a_turn_in_the_models_template_ends_a_reply(folder: Path) -> None:
    """Tokenizers of Qwen's base models end at <|endoftext|>, but their templates write <|im_end|>."""
    set_end_of_text(folder, "<|endoftext|>")
    renderer = Renderer(write_template(folder))
    assert renderer.stop == (IM_END, END_OF_TEXT)
    assert renderer.encode_reply("A") == (A, IM_END)
    ids, _ = renderer.tokenize_dialogue(DIALOGUE)
    assert renderer.decode_prompt(ids).endswith("assistant\nB<|im_end|>")


def test_a_token_that_begins_the_next_message_ends_no_reply(folder: Path) -> None:
    set_end_of_text(folder, "<|endoftext|>")
    write_template(
        folder,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
        "<|im_end|>assistant\n",
    )
    assert Renderer(folder).stop == (END_OF_TEXT,)


def test_a_model_without_an_end_of_replies_is_refused(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(str(folder))
    write_template(folder, "{% for message in messages %}{{ message.content }}\n{% endfor %}")
    expected = "no token ends a reply; set eos_token in tokenizer_config"
    with pytest.raises(ModelError, match=expected):
        Renderer(folder)


def demo_config(*overrides: str) -> RunConfig:
    return RunConfig.from_values(resolve(["experiment=demo_math", *overrides]), "a test")


def test_each_policy_has_its_own_template_arguments(folder: Path) -> None:
    solver_arguments = "policies.solver.chat_template_kwargs={enable_thinking: false}"
    config = demo_config("cold_start=null", solver_arguments)
    assert config.policies["verifier"].chat_template_kwargs == {}

    write_template(folder)
    folders = {"solver": folder, "verifier": folder}
    renderers = make_renderers(config, folders)
    added_tokens = len(renderers["solver"].render(PROMPT)) - len(
        renderers["verifier"].render(PROMPT)
    )
    assert added_tokens == len(EMPTY_THOUGHT)

    write_template(folder, SWITCHABLE_TEMPLATE.replace("enable_thinking", "other"))
    expected = r"^policies.solver: .*: the chat template does not use 'enable_thinking'"
    with pytest.raises(ModelError, match=expected):
        make_renderers(config, folders)


def test_a_cold_start_takes_no_template_arguments() -> None:
    expected = r"policies\.solver: a cold start makes the model with a chat template of its own"
    with pytest.raises(ConfigError, match=expected):
        demo_config("policies.solver.chat_template_kwargs={enable_thinking: false}")
