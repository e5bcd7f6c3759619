import json
import random

import pytest

from demo.conversations import Chat, ChatMaker
from demo.dataset import END, START, ChatEncoder
from demo.entries import load_entries
from demo.tokenizer import ASSETS, VOCABULARY_SIZE

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder()


@pytest.fixture(scope="module")
def reference() -> object:
    return transformers.AutoTokenizer.from_pretrained(ASSETS)


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    maker = ChatMaker(load_entries(), random.Random(5))
    entries = random.Random(6).sample(load_entries(), 60)
    return [maker.chat_about(entry) for entry in entries] + [maker.multi_turn(entry, 6) for entry in entries[:10]]


def test_vocabulary_has_exactly_the_size_of_the_embedding(encoder, reference):
    assert encoder.tokenizer.get_vocab_size() == VOCABULARY_SIZE == len(reference)
    assert json.loads((ASSETS / "config.json").read_text())["vocab_size"] == VOCABULARY_SIZE


def test_rendering_and_ids_equal_those_of_transformers(encoder, reference, chats):
    for chat in chats:
        for prompt_only, thinking in ((False, False), (True, False), (True, True)):
            messages = chat.messages[:-1] if prompt_only else chat.messages
            options = {"tools": chat.tools, "add_generation_prompt": prompt_only, "enable_thinking": thinking}
            text = encoder.render(chat, prompt_only, thinking)
            assert text == reference.apply_chat_template(messages, tokenize=False, **options)
            ids = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
            assert encoder.encode_many([text])[0] == ids


def test_any_text_survives_encoding(encoder):
    for text in ("naïve 'ß' 日本語 \x00\t\r\n  x", "    def f(self):\n\n\n        return {1: 'a'}\n", "a" * 500):
        assert encoder.tokenizer.decode(encoder.tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_loss_covers_what_the_assistant_says_and_nothing_else(encoder, chats):
    for chat in chats:
        ids = encoder.encode_many([encoder.render(chat)])[0]
        mask = encoder.loss_mask(ids)
        spoken_value = encoder.tokenizer.decode([i for i, counts in zip(ids, mask, strict=True) if counts])
        answers = [message for message in chat.messages if message["role"] == "assistant"]
        assert spoken_value.endswith(answers[-1]["content"])
        assert all(message["content"] in spoken_value for message in answers)
        assert sum(1 for i, counts in zip(ids, mask, strict=True) if counts and i == END) == len(answers)
        assert not any(counts and i == START for i, counts in zip(ids, mask, strict=True))


def test_prompt_is_the_beginning_of_the_trained_text(encoder, chats):
    for chat in chats:
        thinking = "reasoning_content" in chat.messages[-1]
        whole = encoder.encode_many([encoder.render(chat)])[0]
        prompt = encoder.encode_many([encoder.render(chat, prompt_only=True, enable_thinking=thinking)])[0]
        assert whole[: len(prompt)] == prompt
        assert encoder.loss_mask(whole)[len(prompt)]
        assert not encoder.loss_mask(whole)[len(prompt) - 1]
