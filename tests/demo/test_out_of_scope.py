"""Questions that must be declined name nothing that is documented, and held-out ones are never trained."""

import random

from demo.conversations import TASKS, UNKNOWN, ChatMaker, answer, by_suffix
from demo.entries import load_entries
from demo.evaluate import first_questions
from demo.out_of_scope import _PARTS, OutOfScope, suffixes
from demo.phrasings import TRAINED

ENTRIES = load_entries()
NAMES = {entry.name for entry in ENTRIES}


def test_made_up_name_is_none_of_the_library_when_it_is_drawn() -> None:
    outside = OutOfScope(ENTRIES, random.Random(1))
    shorter = {suffix for name in NAMES for suffix in suffixes(name)}
    drawn = {outside.name() for _ in range(3000)}
    assert len(drawn) > 1500
    assert not drawn & (NAMES | shorter)


def test_held_out_parts_differ_when_parts_are_trained() -> None:
    for part in ("packages", "attributes", "subjects", "open_questions", "fixed"):
        assert not set(_PARTS[part]) & set(_PARTS[f"held_out_{part}"]), part


def test_every_question_is_declined_when_it_is_out_of_scope() -> None:
    maker = ChatMaker(ENTRIES, random.Random(2))
    outside = OutOfScope(ENTRIES, random.Random(3), held_out=True)
    assert {maker.declined(outside).messages[-1]["content"] for _ in range(200)} == {UNKNOWN}


def test_short_name_is_answered_when_one_entry_has_it_and_listed_when_several_have() -> None:
    maker = ChatMaker(ENTRIES, random.Random(4))
    entries = {entry.name: entry for entry in ENTRIES}
    named = by_suffix(ENTRIES)
    assert named["dedent"] == ["textwrap.dedent"]
    assert named["dumps"][:2] == ["json.dumps", "pickle.dumps"]
    kinds = set()
    for name in ("textwrap.dedent", "json.dumps", "len"):
        chat = maker.short_name(entries[name], {"describe": TRAINED["describe"]})
        kinds.add(chat.kind)
        reply = chat.messages[-1]["content"]
        assert reply.startswith("Several names end in `dumps`: `json.dumps`") or reply == answer(
            entries[name], "describe"
        )
    assert kinds == {"short_name", "several", "describe"}


def test_every_task_is_done_by_a_documented_name() -> None:
    assert set(TASKS) <= NAMES
    assert all(TASKS.values())


def test_first_questions_have_three_kinds_when_they_are_drawn() -> None:
    kinds = {chat.kind for chat in first_questions(ENTRIES, 60)}
    assert {"task", "out_of_scope", "several"} <= kinds
