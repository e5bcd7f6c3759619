"""Conversations with calls of tools, under templates that want them in different forms."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from mini_infer_prompts.call_form import CallForm
from mini_infer_prompts.chat_template import ChatTemplate
from mini_infer_prompts.prompt import PromptAssets, PromptEncoder, chat_prompt_text
from tests.prompts.folders import TOKENIZERS, write_folder
from tests.prompts.templates import CHATML, WITH_CALLS
from tests.prompts.test_messages import BROKEN

FORMS = {
    "deepseek_v3": CallForm(text_arguments=True, null_content=True),
    "deepseek_v31": CallForm(text_arguments=True),
    "qwen_coder": CallForm(shows_text=False),
    "hermes": CallForm(),
    "python_repr": CallForm(text_arguments=True),
    "qwen_thinking": CallForm(),
    "llama3": CallForm(),
    "mistral_tools": CallForm(),
}
ARGUMENTS = '{"city": "Zürich", "days": [1, 2]}'


def conversation(arguments: Any, content: str | None) -> list[dict[str, Any]]:
    function = {"name": "get_weather", "arguments": arguments}
    calls = [{"id": "call00001", "type": "function", "function": function}]
    return [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "Sunny"},
    ]


@pytest.mark.parametrize("style", WITH_CALLS)
def test_the_form_is_found_when_a_template_shows_calls(style: str) -> None:
    assert ChatTemplate(WITH_CALLS[style]).call_form == FORMS[style]


def test_the_form_is_the_default_when_a_template_shows_no_calls() -> None:
    assert ChatTemplate(CHATML).call_form == CallForm()


@pytest.mark.parametrize("style", WITH_CALLS)
@pytest.mark.parametrize("content", [None, "", "absent"])
def test_the_prompt_is_that_of_transformers_when_a_call_is_in_the_history(style: str, content: str | None) -> None:
    form = FORMS[style]
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), TOKENIZERS["byte_level"](), chat_template=WITH_CALLS[style])
        reference = AutoTokenizer.from_pretrained(folder)
        encoder = PromptEncoder(PromptAssets.from_directory(folder))
    sent = conversation(ARGUMENTS, content)
    if content == "absent":
        del sent[1]["content"]
    shown = conversation(ARGUMENTS if form.text_arguments else json.loads(ARGUMENTS), None if form.null_content else "")
    expected = reference.apply_chat_template(shown, tokenize=False, add_generation_prompt=True, date_string="today")
    text = chat_prompt_text(encoder, {"messages": sent, "chat_template_kwargs": {"date_string": "today"}}).text
    assert text == expected
    assert "get_weather" in text
    assert "Zürich" in text


@pytest.mark.parametrize("style", sorted(set(WITH_CALLS) - {"llama3", "mistral_tools"}))
@pytest.mark.parametrize("content", ["Let me look.", " \n"])
def test_the_prompt_shows_text_and_call_when_a_message_has_both(style: str, content: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), TOKENIZERS["byte_level"](), chat_template=WITH_CALLS[style])
        encoder = PromptEncoder(PromptAssets.from_directory(folder))
    text = chat_prompt_text(encoder, {"messages": conversation(ARGUMENTS, content)}).text
    assert content.strip() in text
    assert "get_weather" in text


@pytest.mark.parametrize("style", WITH_CALLS)
@pytest.mark.parametrize("arguments", BROKEN, ids=lambda text: text[:12])
def test_the_prompt_shows_arguments_when_they_are_no_json(style: str, arguments: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), TOKENIZERS["byte_level"](), chat_template=WITH_CALLS[style])
        encoder = PromptEncoder(PromptAssets.from_directory(folder))
    text = chat_prompt_text(encoder, {"messages": conversation(arguments, None)}).text
    assert arguments in text or json.dumps(arguments, ensure_ascii=False)[1:-1] in text
