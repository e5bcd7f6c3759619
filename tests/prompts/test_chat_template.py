import threading
from typing import Any

import jinja2.sandbox
import pytest

from mini_infer_prompts.chat_template import ChatTemplate
from mini_infer_web.api_errors import ApiError
from tests.prompts.templates import CHATML, STYLES

USER = {"role": "user", "content": "hi"}
DRAFT = {"role": "assistant", "content": " Once upon "}


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    flags = {"add_generation_prompt": False, "continue_final_message": False} | options
    return ChatTemplate(source).render(messages, {"bos_token": "<s>"}, **flags)


def test_chat_templates_trim_blocks_and_have_loop_controls() -> None:
    source = "{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n[{{ m.role }}]\n{% endfor %}\n"
    assert render(source, [USER, DRAFT]) == "[assistant]\n"


def test_tojson_does_not_escape_and_takes_options() -> None:
    source = "{{ {'b': '<é>', 'a': 1} | tojson }}{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=True) }}"
    assert render(source, [USER]) == '{"b": "<é>", "a": 1}{"a":2,"b":1}'


def test_a_generation_block_renders_its_body_in_its_own_scope() -> None:
    source = "{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x }}"
    assert render(source, [USER]) == "ba"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.deeper }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages.append(1) }}", "safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{{ 1 // 0 }}", "division"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_request_gets_400_when_its_chat_template_fails(source: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as raised:
        render(source, [USER])
    assert (raised.value.status, raised.value.param, raised.value.code) == (400, "messages", "chat_template_error")


def test_the_line_is_named_when_a_template_is_broken() -> None:
    with pytest.raises(ValueError, match="chat template, line 2: "):
        ChatTemplate("fine\n{% if %}")
    with pytest.raises(ValueError, match=r"line 1: .*'nothing'"):
        ChatTemplate("{{ messages | nothing }}")


def test_the_last_message_is_left_open_when_it_is_continued() -> None:
    continued = {"continue_final_message": True}
    closed = render(CHATML, [USER, DRAFT])
    assert render(CHATML, [USER, DRAFT], **continued) == closed.removesuffix("<|im_end|>\n")
    trimming = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert render(trimming, [USER, DRAFT], **continued) == "[hi][Once upon"
    parts = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(parts, [{"role": "assistant", "content": content}], **continued) == "[a][b"
    assert content[1]["text"] == "b", "the messages are not changed"


@pytest.mark.parametrize(
    ("source", "last", "flags", "words"),
    [
        (CHATML, DRAFT, {"add_generation_prompt": True}, "exclude each other"),
        ("{{ messages[0].content }}", DRAFT, {}, "does not show"),
        (CHATML, {"role": "assistant", "content": []}, {}, "no text to continue"),
        (CHATML, {"role": "assistant", "content": None}, {}, "no text to continue"),
    ],
)
def test_continue_final_message_is_refused_when_it_cannot_apply(
    source: str, last: dict[str, Any], flags: dict[str, bool], words: str
) -> None:
    with pytest.raises(ApiError, match=words) as raised:
        render(source, [USER, last], continue_final_message=True, **flags)
    assert (raised.value.status, raised.value.param) == (400, "continue_final_message")


def test_the_content_form_of_a_chat_template_is_detected() -> None:
    part = "{{ p['text'] if p['type'] == 'text' }}"
    parts = f"{{% for m in messages %}}{{% for p in m['content'] %}}{part}{{% endfor %}}{{% endfor %}}"
    assert ChatTemplate(parts).uses_content_parts
    assert not any(ChatTemplate(source).uses_content_parts for source in STYLES.values())
    assert not ChatTemplate("{{ raise_exception('never') }}").uses_content_parts
    assert ChatTemplate("{% if m.role == 'developer' %}{% endif %}").knows_developer_role
    assert not ChatTemplate(CHATML).knows_developer_role


def test_threads_can_share_a_chat_template() -> None:
    template = ChatTemplate(CHATML)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            message = {"role": "user", "content": f"number {number}"}
            text = template.render([message], {}, add_generation_prompt=True, continue_final_message=False)
            if f"number {number}<" not in text:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_dict_fields_are_read_as_by_jinja() -> None:
    """Methods come before keys of the same name, and what is private stays so."""
    message = {"role": "user", "content": "hi", "items": "an item", "__class__": "a key"}
    source = "{{ m.role }} {{ m.items is callable }} {{ m.missing is defined }} {{ m['items'] }} {{ m.__class__ }}"
    template = ChatTemplate("{% for m in messages %}" + source + "{% endfor %}")
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(
        "{% for m in messages %}" + source + "{% endfor %}"
    )
    text = template.render([message], {}, add_generation_prompt=False, continue_final_message=False)
    assert text == plain.render(messages=[message])
    assert text.startswith("user True False an item")
