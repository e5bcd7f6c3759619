"""The tokens of `output_text.logprobs`, joined, are the text: whole or streamed, whatever was generated around it."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer_engine.api.dialects.openai.text_logprobs import TextLogprobs
from mini_infer_engine.api.dialects.responses.items import EventWriter
from mini_infer_engine.api.dialects.responses.output import ResponseOutput
from mini_infer_engine.parsing.base import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin


def entry(data: bytes, logprob: float = -1.0) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data), "top_logprobs": []}


def joined(logprobs: list[dict[str, Any]]) -> bytes:
    return b"".join(bytes(one["bytes"]) for one in logprobs)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(ends)]


CASES: list[tuple[list[str], str]] = [
    (["Hel", "lo", " wörld"], "Hello wörld"),
    (["</think>", "\n\n", "Hello", "<|im_end|>"], "Hello"),
    (["</think>", "\n\nHello"], "Hello"),
    (["<|im_start|>", "<", "b", ">"], "<b>"),
    (["Hello", " STO", "P"], "Hello"),
    (["Hello.\n", "\n"], "Hello."),
    (["a", "a", "a"], "aaa"),
]


@pytest.mark.parametrize(("tokens", "text"), CASES)
def test_joined_tokens_are_the_text_when_others_surround_them(tokens: list[str], text: str) -> None:
    logprobs = TextLogprobs()
    logprobs.push([entry(token.encode()) for token in tokens])
    assert joined(logprobs.take(text) + logprobs.finish()) == text.encode()


@given(
    st.text(min_size=1, max_size=12), st.lists(st.integers(0, 99), max_size=6), st.lists(st.integers(0, 99), max_size=3)
)
def test_joined_tokens_are_the_text_when_both_are_cut_anywhere(text: str, tokens: list[int], pieces: list[int]) -> None:
    data = text.encode()
    ends = sorted({place % (len(text) + 1) for place in pieces} | {0, len(text)})
    logprobs, answered, fed = TextLogprobs(), list[dict[str, Any]](), 0
    waiting = cut(data, tokens)
    for start, end in pairwise(ends):
        while fed < len(text[:end].encode()):
            fed += len(waiting[0])
            logprobs.push([entry(waiting.pop(0))])
        answered += logprobs.take(text[start:end])
    assert joined(answered + logprobs.finish()) == data


def output_of(steps: list[tuple[list[Part], list[str]]]) -> ResponseOutput:
    output = ResponseOutput(EventWriter("resp_1"))
    for parts, tokens in steps:
        output.push(parts, [entry(token.encode()) for token in tokens])
    output.end("completed")
    return output


def test_a_stream_has_the_log_probabilities_of_the_whole_when_the_model_thinks_and_calls() -> None:
    call: list[Part] = [ToolCallBegin(0, "c", "f"), ToolCallArguments(0, "{}")]
    tokens = ["</think>", "\n\n", "I ", "look.\n", "<tool_call>", "{}", "</tool_call>", "<|im_end|>"]
    streamed = output_of(
        [
            ([Reasoning("Hm")], ["Hm"]),
            ([], ["</think>"]),
            ([], ["\n\n"]),
            ([Content("I")], ["I "]),
            ([Content(" look.")], ["look.\n"]),
            ([], ["<tool_call>"]),
            (call, ["{}"]),
            ([], ["</tool_call>"]),
            ([], ["<|im_end|>"]),
        ]
    )
    whole = output_of([([Reasoning("Hm"), Content("I look."), *call], tokens)])
    assert whole.items == streamed.items
    (part,) = whole.items[1]["content"]
    assert joined(part["logprobs"]) == part["text"].encode() == b"I look."
