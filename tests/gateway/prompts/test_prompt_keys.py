"""Keys with what is remembered, against keys of the whole prompt's ids: the same, and cheap where little is new."""

import functools
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_infer_contract.blocks import block_keys
from mini_infer_gateway.index.prefix_index import prompt_root
from mini_infer_gateway.prompts import prompt_cache, prompt_keys
from mini_infer_gateway.prompts.prompt_cache import PromptCache
from mini_infer_gateway.prompts.prompt_keys import chat_prompts, embedding_prompts, key_steps, text_prompts
from mini_infer_gateway.routing.base import PromptKeys
from mini_infer_prompts import text_slices
from mini_infer_prompts.prompt import PromptAssets, PromptEncoder, chat_prompt_ids
from mini_infer_web.api_errors import ApiError
from tests.prompts import conversations
from tests.prompts.folders import TOKENIZERS, write_folder
from tests.prompts.templates import STYLES
from tests.support.prompt_ids import completion_prompt_ids

Body = dict[str, Any]


@functools.cache
def encoder_of(tokenizer: str, style: str) -> PromptEncoder:
    with tempfile.TemporaryDirectory() as name:
        folder = write_folder(Path(name), TOKENIZERS[tokenizer](), chat_template=STYLES[style])
        return PromptEncoder(PromptAssets.from_directory(folder))


def keys(encoder: PromptEncoder, cache: PromptCache, body: Body, limit: int | None = None) -> PromptKeys | None:
    read = chat_prompts if "messages" in body else embedding_prompts if "input" in body else text_prompts
    steps = key_steps(encoder, cache, read, body, limit)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: PromptKeys | None = end.value
        return result


def expected(encoder: PromptEncoder, body: Body) -> tuple[int, list[list[bytes]]]:
    prompts = [chat_prompt_ids(encoder, body)] if "messages" in body else completion_prompt_ids(encoder, body)
    root = prompt_root(salt=body.get("cache_salt", ""))
    return sum(map(len, prompts)), [block_keys(prompt, root) for prompt in prompts]


def check(encoder: PromptEncoder, cache: PromptCache, body: Body) -> None:
    found = keys(encoder, cache, body)
    assert found is not None
    assert (found.tokens, [list(chain) for chain in found.chains]) == expected(encoder, body)


@pytest.mark.parametrize("tokenizer", ["byte_level", "byte_level_llama3", "prepend_normalizer", "normalized_tokens"])
@pytest.mark.parametrize("style", ["qwen_thinking", "llama3", "mistral_tools", "chatml"])
@settings(max_examples=15, deadline=None)
@given(
    messages=st.lists(conversations.users | conversations.assistants, min_size=1, max_size=8),
    bodies=st.lists(
        st.tuples(st.integers(1, 8), st.booleans(), st.sampled_from(["", "salt"]), st.integers(0, 7)), max_size=6
    ),
    budget=st.sampled_from([0, 20_000, 1 << 20]),
)
def test_cached_prompt_keys_equal_those_of_the_whole_prompt(
    tokenizer: str,
    style: str,
    messages: list[Body],
    bodies: list[tuple[int, bool, str, int]],
    budget: int,
) -> None:
    """Growing, regenerated, edited, salted and shrunk chats, through one memory."""
    encoder, cache = encoder_of(tokenizer, style), PromptCache(budget)
    with (
        patch.object(prompt_cache, "MIN_CHARACTERS", 8),
        patch.object(prompt_keys, "MIN_CHARACTERS", 8),
        patch.object(prompt_keys, "STEP_CHARACTERS", 5),
        patch.object(text_slices, "SLICE_CHARACTERS", 3),
    ):
        for count, special, salt, edited in [(8, False, "", 7), *bodies, (8, True, "", 0)]:
            chat = [dict(message) for message in messages[:count]]
            if edited < len(chat):
                chat[edited]["content"] = f"edited {count} {special}"
            body = {"messages": chat, "add_special_tokens": special, "cache_salt": salt}
            try:
                expected(encoder, body)
            except ApiError:
                continue
            check(encoder, cache, body)
            text = "".join(str(message["content"]) + "<|im_end|>" for message in chat)
            check(encoder, cache, {"prompt": [text, [1, 2, 3] * 20, text + "<|im_end|> more"]})


def chat(turns: int, words: int = 300, last: str = "") -> Body:
    messages = []
    for turn in range(turns):
        role = "user" if turn % 2 == 0 else "assistant"
        messages.append({"role": role, "content": f"turn {turn}: " + "and so on " * words})
    return {"messages": [*messages, {"role": "user", "content": last or f"the last of {turns}"}]}


def encoded(encoder: PromptEncoder, cache: PromptCache, body: Body) -> int:
    """Characters that went through the pieces, cached there or not."""
    with patch.object(
        type(encoder.segments), "pieces", autospec=True, side_effect=type(encoder.segments).pieces
    ) as spy:
        check_only = keys(encoder, cache, body)
        assert check_only
        (call,) = spy.call_args_list
        return len(call.args[1]) - call.args[2]


def test_only_new_text_is_tokenised_when_a_chat_grows_or_its_last_message_changes() -> None:
    encoder, cache = encoder_of("byte_level", "qwen_thinking"), PromptCache(1 << 20)
    whole = encoded(encoder, cache, chat(10))
    assert whole > 30_000
    for turns in (12, 14):
        assert encoded(encoder, cache, chat(turns)) < 2 * 3_200
    for last in ("another", "a third", "x" * 3000, "the fifth"):
        assert encoded(encoder, cache, chat(14, last=last)) < len(last) + 3_200
    check(encoder, cache, chat(14, last="the sixth"))
    other = chat(14, last="of another tenant") | {"cache_salt": "tenant"}
    assert encoded(encoder, cache, other) > 30_000, "other keys"


def test_prompt_cache_keeps_chats_when_they_share_a_system_prompt() -> None:
    encoder, cache = encoder_of("byte_level", "qwen_thinking"), PromptCache(4 << 20)
    system = {"role": "system", "content": "be kind " * 2_000}
    bodies = [
        {"messages": [system, {"role": "user", "content": f"chat {number}: " + "well, " * 2_000}]}
        for number in range(20)
    ]
    first = [encoded(encoder, cache, body) for body in bodies]
    assert max(first[1:]) < 13_000 < 28_000 < first[0]
    assert max(encoded(encoder, cache, body) for body in bodies) < 100


def test_prompt_keys_are_right_when_a_template_changes_earlier_messages() -> None:
    """This one shows an assistant's reasoning until the next question comes."""
    encoder, cache = encoder_of("byte_level", "qwen_thinking"), PromptCache(1 << 20)
    body = chat(6)
    body["messages"][-1] = {"role": "assistant", "content": "answer", "reasoning_content": "let me think"}
    body["messages"][3]["reasoning_content"] = "hidden " * 500
    check(encoder, cache, body)
    body["messages"].append({"role": "user", "content": "and now?"})
    check(encoder, cache, body)
    body["messages"][2:4] = []
    check(encoder, cache, body)


def test_prompt_cache_memory_is_bounded() -> None:
    encoder, cache = encoder_of("byte_level", "chatml"), PromptCache(300_000)
    for number in range(40):
        check(encoder, cache, chat(3, words=400, last=f"{number} " * 3_000))
        assert cache._bytes == sum(entry.size_bytes for entry in cache._all) <= 300_000
    assert len(cache._all) > 3
    assert {id(entry) for entries in cache._by_beginning.values() for entry in entries} == set(map(id, cache._all))


def test_a_prompt_is_refused_before_tokenisation_when_it_exceeds_the_context() -> None:
    encoder, cache = encoder_of("byte_level", "chatml"), PromptCache(0)
    for body in (
        {"messages": [{"role": "user", "content": "word " * 40_000}]},
        {"prompt": "word " * 40_000},
        {"prompt": ["short", [7] * 2_000]},
    ):
        before = encoder.segments.encoded_characters
        with pytest.raises(ApiError, match=r"1000 tokens \(max_model_len\)") as raised:
            keys(encoder, cache, body, limit=1_000)
        assert (raised.value.status, raised.value.code) == (400, "context_length_exceeded")
        assert encoder.segments.encoded_characters - before < 40_000
    assert keys(encoder, cache, {"prompt": [7] * 1_000}, limit=1_000)


def test_batch_keys_equal_those_of_each_prompt_alone() -> None:
    encoder = encoder_of("byte_level", "chatml")
    chats = [[{"role": "user", "content": f"{number}: a question of some length"}] for number in range(3)]
    of_each = [prompt_keys.chat_prompts(encoder, {"messages": messages})[0] for messages in chats]
    assert prompt_keys.batch_prompts(encoder, {"messages": chats}) == of_each
    assert prompt_keys.invocation_prompts(encoder, {"messages": chats[0]}) == of_each[:1]
    assert prompt_keys.invocation_prompts(encoder, {"prompt": [1, 2]}) == [[1, 2]]


def test_a_prompt_is_routed_by_load_when_the_engine_truncates_it() -> None:
    encoder, cache = encoder_of("byte_level", "chatml"), PromptCache(0)
    for kept, tokens in ((100, 100), (-1, 0)):
        found = keys(encoder, cache, {"prompt": "word " * 40_000, "truncate_prompt_tokens": kept}, limit=1_000)
        assert found is not None
        assert (found.tokens, found.chains) == (tokens, ())


def test_embedding_inputs_are_tokenised_as_prompts_and_named_as_input_in_errors() -> None:
    encoder, cache = encoder_of("byte_level", "chatml"), PromptCache(0)
    texts = ["word " * 30, "another " * 30]
    assert keys(encoder, cache, {"input": texts}) == keys(encoder, cache, {"prompt": texts})
    with pytest.raises(ApiError) as raised:
        keys(encoder, cache, {"input": ["x", {}]})
    assert raised.value.param == "input[1]"
    assert "prompt" not in raised.value.message
