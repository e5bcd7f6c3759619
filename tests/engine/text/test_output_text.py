from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mini_infer_engine.core.request import Output, Request, SamplingParams
from mini_infer_engine.dry.vocabulary import TURN_END_ID, dry_assets
from mini_infer_engine.text.output_text import OutputText

TOKENIZER = Tokenizer.from_str(dry_assets().files["tokenizer.json"])


def make_reply(**sampling: object) -> OutputText:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return OutputText(Request(request_id="r", prompt_token_ids=[1], sampling=params), TOKENIZER)


def outputs(token_ids: list[int], cuts: list[int], finish_reason: str = "stop") -> list[Output]:
    """The tokens as steps of the given sizes would bring them; the last says that it is the last."""
    steps: list[list[int]] = []
    rest = list(token_ids)
    for cut in cuts:
        if len(rest) > cut:
            steps.append(rest[:cut])
            rest = rest[cut:]
    steps.append(rest)
    return [
        Output(request_id="r", token_ids=step, finish_reason=finish_reason if index == len(steps) - 1 else None)  # type: ignore[arg-type]
        for index, step in enumerate(steps)
    ]


texts = st.text("ab€😀", max_size=24)


@given(texts, st.lists(st.text("ab€", min_size=1, max_size=3), max_size=3), st.lists(st.integers(1, 5)), st.booleans())
def test_stream_usage_and_end_are_independent_of_token_grouping(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    token_ids = [*text.encode(), TURN_END_ID]
    whole = make_reply(stop=stops, include_stop_str_in_output=include, skip_special_tokens=True)
    for output in outputs(token_ids, [1] * len(token_ids)):
        whole.push(output)
    cut = make_reply(stop=stops, include_stop_str_in_output=include)
    pieces = [cut.push(output) for output in outputs(token_ids, cuts)]
    assert "".join(piece.text for piece in pieces) == cut.text == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == cut.token_ids == whole.token_ids
    assert (cut.finish_reason, cut.stop_reason) == ("stop", whole.stop_reason)
    if not any(stop in text for stop in stops):
        assert cut.text == text
        assert not cut.needs_abort
        assert cut.token_ids == token_ids
    elif not include:
        assert not any(stop in cut.text for stop in stops)


def test_a_stop_string_ends_text_and_usage_and_requests_an_abort() -> None:
    reply = make_reply(stop=["lo w"])
    for token_id in b"hello world":
        reply.push(Output(request_id="r", token_ids=[token_id]))
    assert (reply.text, bytes(reply.token_ids)) == ("hel", b"hello w")
    assert (reply.finish_reason, reply.stop_reason, reply.needs_abort) == ("stop", "lo w", True)


def test_stop_strings_are_ignored_before_min_tokens() -> None:
    reply = make_reply(stop=["a"], min_tokens=2)
    for token_id in b"aaba":
        reply.push(Output(request_id="r", token_ids=[token_id]))
    assert (reply.text, len(reply.token_ids)) == ("aab", 4)


def test_the_stop_token_is_shown_only_when_requested() -> None:
    last = Output(request_id="r", token_ids=[ord("x")], finish_reason="stop", stop_reason=ord("x"))
    hidden, shown = make_reply(), make_reply(include_stop_str_in_output=True)
    hidden.push(last)
    shown.push(last)
    assert (hidden.text, shown.text) == ("", "x")
    assert hidden.token_ids == shown.token_ids == [ord("x")]
    assert hidden.stop_reason == ord("x")


def test_an_incomplete_character_is_shown_only_at_the_end() -> None:
    reply = make_reply()
    assert reply.push(Output(request_id="r", token_ids=list("é".encode()[:1]))).text == ""
    assert (
        reply.push(Output(request_id="r", token_ids=[0x61], finish_reason="length")).text
        == "\N{REPLACEMENT CHARACTER}a"
    )
