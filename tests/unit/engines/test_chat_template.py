"""Chats as a model folder's own tokenizer writes them: switches of its template, what ends a reply, base models."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mcore_mas.config.compose import resolve
from mcore_mas.config.run import ConfigError, RunConfig
from mcore_mas.runtime.players import make_renderers
from rollout.base.errors import ModelError
from rollout.engines import EngineClient
from rollout.models.chat_template import Renderer
from rollout.records.trajectory import Completion, Message, Sampling

CHAT = (Message(role="system", content="S"), Message(role="user", content="U"))
# as Qwen3's: thoughts are switched off by an empty one at the start of the reply
SWITCHED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 256, 257, 258


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of bytes whose end is <|im_end|>, without a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: i for i, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(
        str(tmp_path)
    )
    return tmp_path


def switched(folder: Path) -> Path:
    (folder / "chat_template.jinja").write_text(SWITCHED)
    return folder


def text(renderer: Renderer, ids: tuple[int, ...]) -> str:
    return str(renderer._tokenizer.decode(list(ids)))


def test_a_template_is_given_its_arguments(folder: Path) -> None:
    head = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    thinks = Renderer(switched(folder))
    answers = Renderer(folder, arguments={"enable_thinking": False})
    assert text(thinks, thinks.render(CHAT)) == head
    assert text(answers, answers.render(CHAT)) == head + "<think>\n\n</think>\n\n"
    ids, written = answers.dialogue((*CHAT, Message(role="assistant", content="A")))
    assert text(answers, ids) == head + "<think>\n\n</think>\n\nA<|im_end|>"
    assert sum(written) == 2  # A and the end


def test_a_conversation_without_tools_is_written_out_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer, written = Renderer(folder, template="plain"), list[int]()
    whole = PreTrainedTokenizerFast.apply_chat_template

    def counted(tokenizer: PreTrainedTokenizerFast, chat: list[object], **how: object) -> object:
        written.append(len(chat))
        return whole(tokenizer, chat, **how)

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", counted)
    asked, other = ([Message(role="user", content=content)] for content in ("2 + 2?", "2 + 3?"))
    first = [renderer.render(asked) for _ in range(8)]
    assert (written, set(first)) == ([1], {first[0]})
    assert renderer.render(other) != first[0]
    assert (
        renderer.render([*asked, Message(role="assistant", content="4"), *other])[: len(first[0])]
        == first[0]
    )
    assert written == [1, 1, 3]


def test_a_template_that_says_the_time_is_asked_each_time(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = (
        "{{ strftime_now('%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    renderer = Renderer(folder)
    assert len({renderer._text([Message(role="user", content="?")]) for _ in range(20)}) > 1


def test_an_argument_that_no_template_reads_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError) as caught:
        Renderer(switched(folder), arguments={"enable_thinkng": False})
    assert str(caught.value) == (
        f"{folder}: its chat template reads no 'enable_thinkng'; take it out of chat_template_kwargs"
    )


@pytest.mark.parametrize(
    ("generation", "stop"),
    [
        (None, (258,)),
        ({"eos_token_id": 256}, (258, 256)),
        ({"eos_token_id": [258, 256]}, (258, 256)),
        ({"temperature": 0.6}, (258,)),
    ],
)
def test_every_end_of_the_generation_config_ends_a_reply(
    folder: Path, generation: object, stop: tuple[int]
) -> None:
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    renderer = Renderer(switched(folder))
    asked: list[Sampling] = []

    class Engine:
        async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling) -> Completion:
            asked.append(sampling)
            return Completion(
                token_ids=(32, stop[-1]), logprobs=(0.0, 0.0), finish_reason="stop", versions=()
            )

    reply = asyncio.run(EngineClient(engine=Engine(), renderer=renderer).say(CHAT, Sampling()))  # type: ignore[arg-type]
    assert asked[0].stop == renderer.stop == stop
    assert reply.text == "A"
    assert renderer.encode_reply("A") == (32, 258)  # written with one end, the tokenizer's


def test_a_model_without_a_template_is_refused_or_given_one_by_name(folder: Path) -> None:
    with pytest.raises(ModelError) as caught:
        Renderer(folder)
    assert str(caught.value) == (
        f"{folder}: a base model without a chat template; set chat_template to one of plain, chatml, "
        "or take the instruct model"
    )
    plain = Renderer(folder, template="plain")
    assert text(plain, plain.render(CHAT)) == "### system\nS\n\n### user\nU\n\n### assistant\n"
    turns = (
        *CHAT,
        Message(role="assistant", content="A"),
        CHAT[1],
        Message(role="assistant", content="B"),
    )
    ids, written = plain.dialogue(turns)
    assert text(plain, ids) == (
        "### system\nS\n\n### user\nU\n\n### assistant\nA<|im_end|>\n\n### user\nU\n\n### assistant\nB<|im_end|>"
    )
    assert (
        text(plain, tuple(i for i, own in zip(ids, written, strict=True) if own))
        == "A<|im_end|>B<|im_end|>"
    )


def test_a_template_of_ours_ends_a_reply_as_it_ends_a_turn(folder: Path) -> None:
    """A base model whose own end is another: it may say either, and writes the template's."""
    PreTrainedTokenizerFast.from_pretrained(str(folder), eos_token="<|endoftext|>").save_pretrained(
        str(folder)
    )
    chatml, plain = Renderer(folder, template="chatml"), Renderer(folder, template="plain")
    assert (chatml.stop, plain.stop) == ((258, 256), (256,))
    assert (chatml.encode_reply("A"), plain.encode_reply("A")) == ((32, 258), (32, 256))
    turns = (
        *CHAT,
        Message(role="assistant", content="A"),
        CHAT[1],
        Message(role="assistant", content="B"),
    )
    ids, written = chatml.dialogue(turns)
    assert text(chatml, ids) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nB<|im_end|>"
    )
    assert (
        text(chatml, tuple(i for i, own in zip(ids, written, strict=True) if own))
        == "A<|im_end|>B<|im_end|>"
    )
    saved = (folder / "tokenizer.json").read_text()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        path.write_text(path.read_text().replace("<|im_end|>", "<|end|>"))
    assert saved != (folder / "tokenizer.json").read_text()
    with pytest.raises(ModelError) as caught:
        Renderer(folder, template="chatml")
    assert str(caught.value) == (
        f"{folder}: its tokenizer has no <|im_end|>, which ends a turn of chat_template chatml; set it to plain"
    )


def test_the_end_that_a_models_own_template_writes_ends_a_reply(folder: Path) -> None:
    """As of Qwen's base models, whose tokenizers end at <|endoftext|> and whose templates write <|im_end|>."""
    PreTrainedTokenizerFast.from_pretrained(str(folder), eos_token="<|endoftext|>").save_pretrained(
        str(folder)
    )
    renderer = Renderer(switched(folder))
    assert (renderer.stop, renderer.encode_reply("A")) == ((258, 256), (32, 258))
    turns = (
        *CHAT,
        Message(role="assistant", content="A"),
        CHAT[1],
        Message(role="assistant", content="B"),
    )
    assert text(renderer, renderer.dialogue(turns)[0]).endswith("assistant\nB<|im_end|>")
    heads = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}<|im_start|>assistant\n"
    (folder / "chat_template.jinja").write_text(
        heads.replace("<|im_start|>assistant", "<|im_end|>assistant")
    )
    assert Renderer(folder).stop == (256,)  # what begins a message ends no reply


def test_a_model_that_ends_no_reply_is_refused(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(str(folder))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    )
    with pytest.raises(
        ModelError, match="nothing ends a reply; name eos_token in tokenizer_config"
    ):
        Renderer(folder)


def config(*overrides: str) -> RunConfig:
    return RunConfig.check(resolve(["experiment=demo_math", *overrides]), "a test")


def test_the_arguments_are_a_policys_own(folder: Path) -> None:
    own = "policies.solver.chat_template_kwargs={enable_thinking: false}"
    run = config("cold_start=null", own)
    assert run.policies["verifier"].chat_template_kwargs == {}
    both = {"solver": switched(folder), "verifier": folder}
    solver, verifier = make_renderers(run, both).values()
    assert len(solver.render(CHAT)) == len(verifier.render(CHAT)) + len("<think>\n\n</think>\n\n")
    (folder / "chat_template.jinja").write_text(SWITCHED.replace("enable_thinking", "other"))
    with pytest.raises(
        ModelError, match=r"^policies.solver: .*: its chat template reads no 'enable_thinking'"
    ):
        make_renderers(run, both)
    with pytest.raises(
        ConfigError,
        match=r"policies\.solver: a cold start makes the model with a chat template of its own",
    ):
        config(own)
