import random

import numpy as np

from demo import phrasings
from demo.conversations import ChatMaker, answer, gives_first_sentence
from demo.dataset import END_OF_TEXT, pack
from demo.entries import load_entries
from demo.evaluate import judge, passed, questions
from demo.snapshot import first_sentence


def test_there_are_enough_phrasings_and_none_is_both_trained_and_held_out():
    trained = {t for templates in phrasings.TRAINED.values() for t in templates}
    held_out = {t for templates in phrasings.HELD_OUT.values() for t in templates}
    assert len(trained) >= 24
    assert len(held_out) >= 8
    assert not trained & held_out


def test_every_right_answer_gives_the_first_sentence():
    for entry in load_entries():
        for kind in phrasings.TRAINED:
            assert gives_first_sentence(answer(entry, kind), entry)
            assert gives_first_sentence("<think>\nx\n</think>\n\n" + answer(entry, kind), entry)


def test_names_are_unique_and_public():
    names = [entry.name for entry in load_entries()]
    assert len(names) == len(set(names)) >= 2500
    assert not [name for name in names if any(part.startswith("_") for part in name.split("."))]


def test_first_sentence_of_docstrings():
    assert first_sentence("Remove any\nwhitespace, e.g. Tabs.  more text") == "Remove any whitespace, e.g. Tabs."
    assert first_sentence("Return the value. It is big.\n\nMore.") == "Return the value."
    assert first_sentence("No full stop at all\n\nMore.") == "No full stop at all"
    assert first_sentence("Usage:") is None


def test_same_seed_same_chats():
    entries = load_entries()[:50]
    one, two = (ChatMaker(entries, random.Random(3)) for _ in range(2))
    assert [one.chat_about(e).messages for e in entries] == [two.chat_about(e).messages for e in entries]


def test_judge_counts_right_and_wrong():
    request_for = questions(load_entries()[:40])
    chats = request_for["held_out"]
    right = [chat.messages[-1]["content"] for chat in chats]
    assert judge(chats, right)["share"] == 1.0
    half = judge(chats, right[:20] + ["Something else."] * (len(chats) - 20))
    assert half["share"] < 1.0
    assert not passed({"trained": {"share": 0.94}, "held_out": {"share": 1.0}})


def test_packing_loses_no_chat_and_splits_none():
    rng = random.Random(1)
    chats = [([rng.randint(3, 9) + 10 * i] * rng.randint(1, 30), []) for i in range(200)]
    chats = [(ids, [True] * len(ids)) for ids, _ in chats]
    rows = pack(chats, 64)
    assert rows.tokens.shape[1] == 64
    found = []
    for row in rows.tokens:
        part: list[int] = []
        for token in [*row.tolist(), END_OF_TEXT]:
            if token != END_OF_TEXT:
                part.append(token)
            elif part:
                found.append(part)
                part = []
    assert sorted(found) == sorted(ids for ids, _ in chats)
    assert np.array_equal(rows.counts_in_loss, rows.tokens != END_OF_TEXT)
