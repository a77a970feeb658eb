"""What a worker's settings say of chat templates and tokenizers, and what a chat may bring."""

import json
import time
from pathlib import Path

import pytest
from pydantic import JsonValue

import tokenizers_made
from penstock.schemas.errors import InvalidJob
from penstock.schemas.job import Chat
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.process.settings import WorkerSettings
from penstock.worker.text import chat_template
from penstock.worker.text.model_tokenizer import load_tokenizer
from penstock.worker.text.time_limit import TookTooLong, limit_time
from tokenizers_made import folder, text

SAYS = "{% for each in messages %}{{ each.content }}{% endfor %}"
IN_PARTS = "{% for each in messages[0].content %}{{ each.type }}:{{ each.text }} {% endfor %}"


def settings_of(folder: Path, **given: object) -> WorkerSettings:
    return WorkerSettings.model_validate({"model": str(folder), **given})


@pytest.mark.parametrize("way", ["written", "file"])
def test_a_template_that_is_given_stands_in_the_place_of_the_models(tmp_path, way):
    (tmp_path / "own.jinja").write_text("[[" + SAYS)
    given = "[[" + SAYS if way == "written" else str(tmp_path / "own.jinja")
    reads = load_tokenizer(settings_of(folder("byte_level"), chat_template=given))
    assert reads.decode(reads.render(Chat(messages=[{"role": "user", "content": "Hi"}]))) == "[[Hi"
    assert json.loads(reads.description())["chat_template"] == "[[" + SAYS


def test_what_is_no_template_is_refused_by_name(tmp_path):
    for given, why in (("{% if %}", "is broken"), (str(tmp_path / "none"), "neither a file nor")):
        with pytest.raises(InvalidJob, match=why) as refused:
            load_tokenizer(settings_of(folder("byte_level"), chat_template=given))
        assert refused.value.param == "chat_template"


@pytest.mark.parametrize(
    "template, kind, said",
    [
        (SAYS, "auto", "a\nb"),
        (SAYS, "string", "a\nb"),
        (IN_PARTS, "auto", "text:a text:b "),
        (IN_PARTS, "openai", "text:a text:b "),
        ("{{ messages[0].content[0].text }}", "auto", "a"),
        ("{{ messages[0].content | length }}", "openai", "2"),
        ("{{ messages[0].content | length }}", "auto", "3"),
    ],
)
def test_contents_are_given_as_the_template_reads_them(template, kind, said):
    reads = load_tokenizer(
        settings_of(folder("byte_level"), chat_template=template, chat_template_content_format=kind)
    )
    parts: JsonValue = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert reads.decode(reads.render(Chat(messages=[{"role": "user", "content": parts}]))) == said


def test_a_text_is_one_part_for_a_template_that_reads_parts():
    reads = load_tokenizer(settings_of(folder("byte_level"), chat_template=IN_PARTS))
    said = reads.render(Chat(messages=[{"role": "user", "content": "a"}]))
    assert reads.decode(said) == "text:a "
    broken: JsonValue = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(InvalidJob, match=r"messages\[0\].content: a part of type 'image_url'"):
        reads.render(Chat(messages=[{"role": "user", "content": broken}]))


def test_a_chat_brings_its_template_only_where_that_is_trusted():
    chat = Chat(
        messages=[{"role": "user", "content": "Hi"}],
        chat_template=f"<<{SAYS}<think>{{# </think> #}}",
    )
    with pytest.raises(InvalidJob, match="--trust-request-chat-template") as refused:
        text("byte_level").render(chat)
    assert refused.value.param == "chat_template"
    reads = load_tokenizer(settings_of(folder("byte_level"), trust_request_chat_template=True))
    prompt = reads.render(chat)
    assert reads.decode(prompt, skip_special_tokens=False) == "<<Hi<think>"
    markup, _ = reads.answer_form(chat, prompt, SamplingParams(), holds_tags=False)
    assert markup is not None and (markup.reasoning, markup.is_open) == ("qwen3", True)
    broken = chat.model_copy(update={"chat_template": "{% if %}"})
    with pytest.raises(InvalidJob, match="messages: the model's chat template refused them"):
        reads.render(broken)


def test_a_tokenizer_of_another_folder_is_read(tmp_path):
    model = tokenizers_made.save(tokenizers_made.byte_level(), tmp_path / "model")
    other = folder("metaspace")
    reads = load_tokenizer(settings_of(model, tokenizer=str(other)))
    assert reads.encode("a word") == text("metaspace").encode("a word")
    with pytest.raises(InvalidJob, match="tokenizer: 'nowhere'") as refused:
        load_tokenizer(settings_of(model, tokenizer="nowhere"))
    assert refused.value.param == "tokenizer"
    with pytest.raises(InvalidJob, match=r"revision: .* is a folder, which has none"):
        load_tokenizer(settings_of(model, revision="main"))


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_that_loops_is_refused_when_it_is_loaded(monkeypatch):
    monkeypatch.setattr(chat_template, "RENDER_S", 0.2)
    for given in (LOOPS + SAYS, SAYS + LOOPS):
        with pytest.raises(InvalidJob, match=r"broken: it computed for 0.2 s") as refused:
            load_tokenizer(settings_of(folder("byte_level"), chat_template=given))
        assert refused.value.param == "chat_template"


def test_a_template_that_loops_for_some_messages_refuses_them_and_reads_others(monkeypatch):
    monkeypatch.setattr(chat_template, "RENDER_S", 0.2)
    given = "{% if 'loop' in messages[0].content %}" + LOOPS + "{% endif %}" + SAYS
    reads = load_tokenizer(settings_of(folder("byte_level"), chat_template=given))
    for _ in range(2):
        with pytest.raises(InvalidJob, match=r"messages: .* it computed for 0.2 s"):
            reads.render(Chat(messages=[{"role": "user", "content": "loop"}]))
        said = reads.render(Chat(messages=[{"role": "user", "content": "Hi"}]))
        assert reads.decode(said) == "Hi"
    own = Chat(messages=[{"role": "user", "content": "Hi"}], chat_template=LOOPS)
    trusting = settings_of(folder("byte_level"), trust_request_chat_template=True)
    with pytest.raises(InvalidJob, match="it computed for"):
        load_tokenizer(trusting).render(own)


def test_time_in_which_a_thread_does_not_compute_is_not_counted():
    def compute(for_s: float) -> None:
        """A function: `with` of Python 3.13 misses what is raised as a loop jumps back."""
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            pass

    with limit_time(0.05):
        time.sleep(0.2)
    with pytest.raises(TookTooLong), limit_time(0.05):
        compute(for_s=20)
