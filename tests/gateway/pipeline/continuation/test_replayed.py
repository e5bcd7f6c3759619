"""Streams that are made again from their beginning: whatever the engines' steps, a client gets each choice once."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from mini_infer_gateway.pipeline.continuation.base import DONE
from mini_infer_gateway.pipeline.continuation.kinds import continuation_of
from mini_infer_gateway.pipeline.continuation.messages import MessageContinuation
from mini_infer_gateway.pipeline.continuation.replayed import ReplayedContinuation
from mini_infer_gateway.pipeline.continuation.responses import ReplayedResponse, ResponseContinuation

TEXTS = ("The first choice.", "Another", "and a third one")
Kind = str


def stream(kind: Kind, dice: random.Random) -> Iterator[bytes]:
    """All choices in steps of one to three tokens, each token a character; their order is by chance."""
    left = [(index, list(text)) for index, text in enumerate(TEXTS)]
    if kind == "chat":
        for index, _ in left:
            yield chunk(index, {"delta": {"role": "assistant", "content": "", "refusal": None}}, [], None)
    while left:
        index, rest = one = dice.choice(left)
        piece = "".join(rest[: dice.randint(1, 3)])
        del rest[: len(piece)]
        ids = [ord(character) for character in piece]
        if kind == "text":
            yield chunk(index, {"text": piece}, ids, None if rest else "stop")
        else:
            yield chunk(index, {"delta": {"content": piece}}, ids, None)
            if not rest:
                yield chunk(index, {"delta": {}}, [], "stop")
        if not rest:
            left.remove(one)
    yield b'data: {"choices":[],"usage":{"total_tokens":3}}\n\n'
    yield DONE


def chunk(index: int, delta: dict[str, Any], ids: list[int], finish: str | None) -> bytes:
    end = {"logprobs": None, "finish_reason": finish, "token_ids": ids}
    event = {"id": "x", "choices": [{"index": index, **delta, **end}]}
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def parsed(events: bytes) -> tuple[list[str], list[int], list[int]]:
    """Texts, roles and ends by choice."""
    texts, roles, ends = ([""] * 3, [0] * 3, [0] * 3)
    for event in events.split(b"\n\n"):
        if event.startswith(b"data: {"):
            for choice in json.loads(event[6:])["choices"]:
                at, delta = choice["index"], choice.get("delta", {})
                texts[at] += choice.get("text") or delta.get("content") or ""
                roles[at] += "role" in delta
                ends[at] += choice["finish_reason"] is not None
    return texts, roles, ends


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_each_choice_is_sent_once_when_the_stream_is_cut_at_any_event(kind: Kind, seed: int) -> None:
    dice = random.Random(seed)
    one, reported = ReplayedContinuation.of({"n": 3}, 5), b""
    for cuts_left in reversed(range(4)):
        body = json.loads(one.body(b'{"n":3}'))
        assert (body["seed"], body["return_token_ids"], "resume_token_ids" in body) == (5, True, False)
        events = list(stream(kind, dice))
        for event in events[: dice.randrange(len(events)) if cuts_left else None]:
            reported += one.take(event)
        if one.done:
            break
    assert parsed(reported) == (list(TEXTS), [kind == "chat"] * 3, [1, 1, 1])
    assert reported.endswith(DONE)
    assert reported.count(b'"usage"') == 1
    assert b"token_ids" not in reported
    assert (one.possible, one.finished, one.done) == (True, True, True)


def test_an_undisturbed_replayed_stream_is_forwarded_unchanged_when_ids_were_requested() -> None:
    one = ReplayedContinuation.of({"n": 3, "return_token_ids": True}, 5)
    events = list(stream("chat", random.Random(0)))
    assert b"".join(map(one.take, events)) == b"".join(events)


def test_a_replay_ends_when_its_tokens_differ() -> None:
    one = ReplayedContinuation.of({"n": 2}, 5)
    one.body(b"{}")
    one.take(chunk(1, {"text": "a"}, [1], None))
    one.body(b"{}")
    assert one.take(chunk(0, {"text": "c"}, [3], None) + chunk(1, {"text": "b"}, [2], None)).count(b"data: ") == 1
    assert (one.differs, one.possible) == (True, False)


def test_a_replay_ends_when_an_indivisible_part_is_split_otherwise() -> None:
    one = ReplayedContinuation.of({"n": 2}, 5)
    one.body(b"{}")
    one.take(chunk(0, {"delta": {"reasoning": "a"}}, [1], None))
    one.body(b"{}")
    assert one.take(chunk(0, {"delta": {"reasoning": "ab"}}, [1, 2], None)) == b""
    assert one.differs


@pytest.mark.parametrize(
    ("form", "fields", "kind"),
    [
        ("chunks", {"n": 2}, ReplayedContinuation),
        ("chunks", {"prompt": ["a", "b"]}, ReplayedContinuation),
        ("chunks", {"prompt": "a", "echo": True}, ReplayedContinuation),
        ("chunks", {"n": 2, "use_beam_search": True}, None),
        ("chunks", {"n": 2, "stream": False}, None),
        ("chunks", {"n": 2, "resume_token_ids": [1]}, None),
        ("responses", {"include": ["message.output_text.logprobs"]}, ReplayedResponse),
        ("responses", {"include": None}, ResponseContinuation),
        ("messages", {}, MessageContinuation),
    ],
)
def test_streams_are_continued_or_replayed_by_their_fields(
    form: Any, fields: dict[str, Any], kind: type | None
) -> None:
    assert continuation_of(form, {"stream": True} | fields) is kind
