"""PromptEncoder against transformers' own tokenizers, over random conversations: the ids must be the same, always."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mini_infer_prompts.prompt import PromptAssets, PromptEncoder
from mini_infer_web.api_errors import ApiError
from tests.prompts import conversations
from tests.prompts.folders import SPLITTING, TOKENIZERS, write_folder
from tests.prompts.templates import STYLES
from tests.support.prompt_ids import encode_chat


@functools.cache
def both(tokenizer: str, style: str) -> tuple[Any, PromptEncoder]:
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), TOKENIZERS[tokenizer](), chat_template=STYLES[style])
        return AutoTokenizer.from_pretrained(folder), PromptEncoder(PromptAssets.from_directory(folder))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=6, deadline=None)  # of each of 78 pairs
@given(
    messages=conversations.conversations,
    tools=st.none() | conversations.tools,
    ending=st.sampled_from(["prompt", "closed", "continue"]),
    kwargs=st.fixed_dictionaries(
        {}, optional={"enable_thinking": st.booleans(), "documents": conversations.documents, "date_string": st.text()}
    ),
)
def test_chat_prompts_equal_transformers(
    tokenizer: str, style: str, messages: list[dict[str, Any]], tools: Any, ending: str, kwargs: dict[str, Any]
) -> None:
    reference, encoder = both(tokenizer, style)
    flags = {"add_generation_prompt": ending == "prompt", "continue_final_message": ending == "continue"}
    try:
        text = reference.apply_chat_template(messages, tools=tools, tokenize=False, **flags, **kwargs)
    except Exception:  # transformers lets through whatever the template met
        with pytest.raises(ApiError) as raised:
            encoder.render(messages, tools, **flags, template_kwargs=kwargs)
        assert raised.value.status == 400
        return
    assert encoder.render(messages, tools, **flags, template_kwargs=kwargs) == text
    ids = reference.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False, **flags, **kwargs)
    assert encode_chat(encoder, messages, tools, **flags, template_kwargs=kwargs) == ids
    assert encoder.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(max_examples=80, deadline=None)
@given(text=conversations.texts, add_special_tokens=st.booleans())
def test_text_prompts_equal_transformers(tokenizer: str, text: str, add_special_tokens: bool) -> None:
    reference, encoder = both(tokenizer, "chatml")
    assert encoder.segments.splits == (tokenizer in SPLITTING)
    ids = reference(text, add_special_tokens=add_special_tokens)["input_ids"]
    assert encoder.encode(text, add_special_tokens) == ids
    assert encoder.encode(text, add_special_tokens) == ids  # now from the cache
    assert encoder.decode(ids, skip_special_tokens=False) == reference.decode(ids)
