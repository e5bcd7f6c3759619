import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mini_infer_prompts.prompt import PromptAssets, PromptEncoder, chat_prompt_ids
from mini_infer_web.api_errors import ApiError
from tests.prompts.conversations import json_values, quick
from tests.prompts.folders import TOKENIZERS, write_folder
from tests.prompts.templates import CHATML, QWEN_THINKING, RAG
from tests.support.prompt_ids import completion_prompt_ids

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def make(folder: Path, chat_template: str | None, in_config: Any = None) -> PromptEncoder:
    write_folder(folder, TOKENIZERS["byte_level_llama3"](), chat_template=chat_template)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": in_config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return PromptEncoder(PromptAssets.from_directory(folder))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return make(tmp_path_factory.mktemp("qwen"), QWEN_THINKING)


@pytest.fixture(scope="module")
def rag(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return make(tmp_path_factory.mktemp("rag"), RAG)


def text_of(encoder: PromptEncoder, **body: Any) -> str:
    return encoder.decode(chat_prompt_ids(encoder, {"messages": [USER]} | body), skip_special_tokens=False)


class TestAssets:
    def test_prompt_assets_survive_json_and_are_identified_by_content(self, tmp_path: Path) -> None:
        folder = write_folder(tmp_path / "a", TOKENIZERS["byte_level"](), chat_template=CHATML)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(RAG)
        (folder / "model.safetensors").write_bytes(b"\xff")
        assets = PromptAssets.from_directory(folder)
        assert set(assets.files) == {
            "tokenizer.json",
            "tokenizer_config.json",
            "config.json",
            "chat_template.jinja",
            "additional_chat_templates/tool_use.jinja",
        }
        travelled = msgspec.json.decode(msgspec.json.encode(assets), type=PromptAssets)
        assert travelled == assets == PromptAssets.from_files(dict(reversed(assets.files.items())))
        assert PromptEncoder(travelled).revision == assets.revision
        for name in assets.files:
            changed = assets.files | {name: assets.files[name] + " "}
            assert PromptAssets.from_files(changed).revision != assets.revision

    def test_the_error_has_a_remedy_when_a_folder_has_no_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"no tokenizer\.json.*save_pretrained"):
            PromptAssets.from_directory(tmp_path)


class TestNamedTemplates:
    templates = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ messages[0].content }}"}  # noqa: RUF012

    @pytest.mark.parametrize("form", ["list", "dict", "files"])
    def test_the_tool_template_is_used_when_tools_are_given(self, tmp_path: Path, form: str) -> None:
        in_config: Any = self.templates
        if form == "list":
            in_config = [{"name": name, "template": template} for name, template in self.templates.items()]
        elif form == "files":
            in_config = "files come first"
            (tmp_path / "additional_chat_templates").mkdir()
            (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(self.templates["tool_use"])
        encoder = make(tmp_path, self.templates["default"] if form == "files" else None, in_config)
        reference = AutoTokenizer.from_pretrained(tmp_path)
        for tools, text in ((None, "Dhi"), ([TOOL], "Thi")):
            assert encoder.render([USER], tools) == text
            assert reference.apply_chat_template([USER], tools=tools, tokenize=False) == text

    def test_the_templates_are_named_when_none_is_the_default(self, tmp_path: Path) -> None:
        encoder = make(tmp_path, None, {"tool_use": "T", "rag": "R"})
        assert encoder.render([USER], [TOOL]) == "T"
        with pytest.raises(ApiError, match=r"\(rag, tool_use\)") as raised:
            chat_prompt_ids(encoder, {"messages": [USER]})
        assert raised.value.status == 400

    def test_a_chat_gets_400_naming_completions_when_the_model_has_no_template(self, tmp_path: Path) -> None:
        with pytest.raises(ApiError, match="/v1/completions") as raised:
            chat_prompt_ids(make(tmp_path, None), {"messages": [USER]})
        assert (raised.value.status, raised.value.code) == (400, "no_chat_template")


class TestChat:
    def test_prompt_defaults_equal_vllms(self, qwen: PromptEncoder) -> None:
        assert text_of(qwen) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"  # no BOS: the template's work
        assert text_of(qwen, add_special_tokens=True).startswith("<s><|im_start|>user")
        assert text_of(qwen, add_generation_prompt=False).endswith("hi<|im_end|>\n")
        assert text_of(qwen, add_generation_prompt=None, tools=None, chat_template_kwargs=None) == text_of(qwen)

    def test_thinking_is_switched_by_template_kwargs_or_reasoning_effort(self, qwen: PromptEncoder) -> None:
        off = text_of(qwen, chat_template_kwargs={"enable_thinking": False})
        assert off.endswith("<think>\n\n</think>\n\n")
        assert text_of(qwen, reasoning_effort="none") == off
        assert text_of(qwen, reasoning_effort="high") == text_of(qwen)
        assert text_of(qwen, reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}) == off

    def test_tools_documents_and_continuation_reach_the_template(self, qwen: PromptEncoder, rag: PromptEncoder) -> None:
        assert json.dumps(TOOL) in text_of(qwen, tools=[TOOL])
        assert text_of(qwen, tools=[]) == text_of(qwen)
        assert text_of(qwen, tools=[TOOL], tool_choice="none") == text_of(qwen)
        assert text_of(qwen, tools=[TOOL], tool_choice="required") == text_of(qwen, tools=[TOOL])
        assert text_of(rag, documents=[{"title": "t", "text": "x"}]) == "[1] t: x\nUSER> hi\nASSISTANT>"
        draft = {"role": "assistant", "content": "Once"}
        flags = {"add_generation_prompt": False, "continue_final_message": True}
        assert text_of(rag, messages=[USER, draft], **flags) == "USER> hi\nASSISTANT> Once"

    def test_client_messages_are_normalised_before_rendering(self, qwen: PromptEncoder) -> None:
        parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
        assert text_of(qwen, messages=[parts]) == text_of(qwen)
        developer, system = ({"role": role, "content": "brief"} for role in ("developer", "system"))
        assert text_of(qwen, messages=[developer, USER]) == text_of(qwen, messages=[system, USER])
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":   "é"}'}}
        assert '"arguments": {"a": "é"}}' in text_of(qwen, messages=[USER, {"role": "assistant", "tool_calls": [call]}])

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"messages": [USER, {"role": "user", "content": 1}]}, "messages[1].content"),
            ({"tools": "f"}, "tools"),
            ({"documents": ["text"]}, "documents"),
            ({"add_generation_prompt": "yes"}, "add_generation_prompt"),
            ({"continue_final_message": 1}, "continue_final_message"),
            ({"continue_final_message": True}, "continue_final_message"),
            ({"chat_template_kwargs": []}, None),
            ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
            ({"reasoning_effort": 3}, "reasoning_effort"),
            ({"messages": [{"role": "user", "content": "half \ud800"}]}, None),
        ],
    )
    def test_the_error_names_a_prompt_field_when_it_is_invalid(
        self, qwen: PromptEncoder, body: dict[str, Any], param: str | None
    ) -> None:
        if body == {"chat_template_kwargs": []}:
            assert text_of(qwen, **body) == text_of(qwen)
            return
        with pytest.raises(ApiError) as raised:
            text_of(qwen, **body)
        assert (raised.value.status, raised.value.param) == (400, param)

    def test_a_chat_is_refused_when_its_template_renders_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ApiError, match="empty prompt"):
            chat_prompt_ids(make(tmp_path, "{# nothing #}"), {"messages": [USER]})

    @quick
    @given(
        body=st.dictionaries(
            st.sampled_from(["tools", "documents", "chat_template_kwargs", "continue_final_message", "messages"]),
            json_values | st.lists(st.just(USER) | json_values),
        )
    )
    def test_any_json_body_is_served_or_refused(self, qwen: PromptEncoder, body: dict[str, Any]) -> None:
        try:
            ids = chat_prompt_ids(qwen, body)
        except ApiError as error:
            status = error.status
        else:
            assert ids
            return
        assert status == 400


class TestCompletions:
    def test_text_gets_special_tokens_and_token_ids_are_unchanged(self, qwen: PromptEncoder) -> None:
        bos = qwen.special_token_id("bos_token")
        plain = qwen.encode("hello", add_special_tokens=False)
        assert completion_prompt_ids(qwen, {"prompt": "hello"}) == [[bos, *plain]]
        assert completion_prompt_ids(qwen, {"prompt": "hello", "add_special_tokens": False}) == [plain]
        assert completion_prompt_ids(qwen, {"prompt": ["hello", "x"]})[0] == [bos, *plain]
        assert len(completion_prompt_ids(qwen, {"prompt": ["hello", "x"]})) == 2
        assert completion_prompt_ids(qwen, {"prompt": ["hello", [7, 8]]}) == [[bos, *plain], [7, 8]]

    def test_token_id_prompts_need_no_tokenizer(self) -> None:
        assert completion_prompt_ids(None, {"prompt": [1, 2, 3]}) == [[1, 2, 3]]
        assert completion_prompt_ids(None, {"prompt": [[1, 2], [3]]}) == [[1, 2], [3]]
        with pytest.raises(ApiError, match="no tokenizer"):
            completion_prompt_ids(None, {"prompt": "text"})

    @pytest.mark.parametrize(
        ("prompt", "param"),
        [
            (None, "prompt"),
            (5, "prompt"),
            ([], "prompt"),
            ({"text": "a"}, "prompt"),
            ([1, "a"], "prompt"),
            ([1, -1], "prompt"),
            ([-1], "prompt[0]"),
            ([1, 2**32], "prompt"),
            ([True], "prompt[0]"),
            ([[1], []], "prompt[1]"),
            ([[1], [1.5]], "prompt[1]"),
            (["a", None], "prompt[1]"),
        ],
    )
    def test_the_error_names_a_prompt_when_it_is_invalid(self, qwen: PromptEncoder, prompt: Any, param: str) -> None:
        with pytest.raises(ApiError) as raised:
            completion_prompt_ids(qwen, {"prompt": prompt})
        assert (raised.value.status, raised.value.param) == (400, param)

    def test_an_empty_prompt_is_refused_when_there_is_no_bos(self, qwen: PromptEncoder) -> None:
        assert completion_prompt_ids(qwen, {"prompt": ""}) == [[qwen.special_token_id("bos_token")]]
        with pytest.raises(ApiError, match="prompt is empty"):
            completion_prompt_ids(qwen, {"prompt": "", "add_special_tokens": False})


def test_only_the_new_end_of_a_growing_chat_is_tokenised(qwen: PromptEncoder) -> None:
    messages: list[dict[str, Any]] = []
    costs = []
    for turn in range(20):
        messages += [{"role": "user", "content": f"question {turn:2} " + "why? " * 50}]
        before = qwen.segments.encoded_characters
        ids = chat_prompt_ids(qwen, {"messages": messages})
        costs.append(qwen.segments.encoded_characters - before)
        text = qwen.render(messages)
        assert ids == qwen.tokenizer.encode(text, add_special_tokens=False).ids
        messages += [{"role": "assistant", "content": f"answer {turn:2}"}]
    assert max(costs) <= 300
    assert len(text) > 20 * 270
