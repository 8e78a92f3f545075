"""Chat templates and tokenizers of strangers are tried with little time and memory, and refused in one line."""

import json
import os
import shutil
from pathlib import Path

import pytest

from mcore_mas.pipeline.base_model import make_tiny_model
from rollout.base.errors import ModelError
from rollout.models.chat_template import CHAT_TEMPLATES, Renderer, chat_template_problem
from rollout.models.template_trial import template_problem
from rollout.records.trajectory import Message

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HUGE_TEXT = "{{ 'x' * 10**11 }}"
TOO_MUCH = "it takes more than 3 s or 1024 MiB"
BAD_TEMPLATES = {
    "endless loops": (LOOPS, TOO_MUCH),
    "a huge text": (HUGE_TEXT, TOO_MUCH),
    "a huge text in long chats only": (
        f"{{% if messages|length > 3 %}}{HUGE_TEXT}{{% endif %}}{{{{ messages[0]['content'] }}}}",
        TOO_MUCH,
    ),
    "a large text": ("{{ 'x' * 2 * 10**7 }}", "it renders 20000000 characters"),
    "doubled texts": (
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        TOO_MUCH,
    ),
    "a macro that calls itself": (
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "it cannot render one message of a user (RecursionError",
    ),
    "no template": ("{% for %}", "it is not a template (Expected an expression"),
    "a division by zero": ("{{ 1 // 0 }}", "it cannot render one message of a user (ZeroDivision"),
    "a refusal of everything": ("{{ raise_exception('no') }}", "it refuses every chat (no)"),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "model")
    return tmp_path / "model"


def set_template(model: Path, template: object) -> None:
    for file in model.glob("chat_template*"):
        file.unlink()
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))


@pytest.mark.parametrize("template", CHAT_TEMPLATES.values())
def test_ordinary_templates_have_no_problem(template: str) -> None:
    assert template_problem(template) == ""


def test_a_template_may_refuse_some_chats_and_mark_generations() -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% if loop.last %}{% break %}{% endif %}{% endfor %}{{ strftime_now('%Y') }}"
    )
    assert template_problem(template) == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD_TEMPLATES)
def test_a_bad_template_is_refused(kind: str, model: Path) -> None:
    template, problem = BAD_TEMPLATES[kind]
    set_template(model, template)
    with pytest.raises(ModelError) as refusal:
        Renderer(model)
    text = str(refusal.value)
    assert text.startswith(f"{model}: the chat template cannot be used: {problem}")
    assert "\n" not in text
    assert chat_template_problem(model).startswith(problem)
    Renderer(model, template="plain")  # a template of ours needs no trial


def test_templates_are_found_in_every_place(model: Path) -> None:
    bad = "{% for %}"
    set_template(model, [{"name": "default", "template": bad}])
    assert "it is not a template" in chat_template_problem(model)
    set_template(model, CHAT_TEMPLATES["plain"])
    assert chat_template_problem(model) == ""
    (model / "chat_template.jinja").write_text(bad)
    assert "it is not a template" in chat_template_problem(model)
    (model / "chat_template.jinja").unlink()
    os.mkfifo(model / "chat_template.jinja")
    assert "it cannot be read" in chat_template_problem(model)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": 5}}'),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "pipe"),
        ("tokenizer.json", "pipe"),
    ],
)
def test_a_bad_tokenizer_is_refused(name: str, content: str | None, model: Path) -> None:
    (model / name).unlink()
    if content == "pipe":
        os.mkfifo(model / name)
    elif content is not None:
        (model / name).write_text(content)
    with pytest.raises(ModelError) as refusal:
        Renderer(model)
    assert str(refusal.value).startswith(f"{model}: ")
    assert "\n" not in str(refusal.value)


def test_a_folder_as_it_was_made_is_rendered(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    renderer = Renderer(tmp_path / "copy")
    assert "1 + 1" in renderer.decode(renderer.render([Message(role="user", content="1 + 1")]))
