"""JSON that is asked for in plain sentences: every value stands in the text, and the judge takes other keys."""

import json
import random

from demo.conversations import Chat, assistant, user
from demo.dataset import ChatEncoder
from demo.evaluate import judge_skills
from demo.skill_values import spoken
from demo.stated_records import made_up, stated, written


def leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def test_text_states_every_value_when_a_record_is_stated() -> None:
    rng = random.Random(1)
    for _ in range(1000):
        _, text, found = stated(rng)
        for value in leaves(found):
            if value not in ("positive", "negative", "neutral"):
                assert spoken(value) in text, (text, found)  # type: ignore[arg-type] - a value of a record


def test_answer_is_one_json_object_when_it_is_written() -> None:
    rng = random.Random(2)
    for draw in (stated, made_up):
        for _ in range(200):
            _, _, found = draw(rng)
            assert json.loads(written(found)) == found
            assert found


def test_judge_takes_other_keys_but_no_other_values_when_a_record_is_stated() -> None:
    encoder = ChatEncoder()
    chat = Chat([user("Bob is 7."), assistant('{"name": "Bob", "age": 7}')], "stated")
    texts = ['{"person": "Bob", "years": 7}', '{"name": "Bob", "age": 8}', "Bob", '{"age": 7, "name": "Bob"}']
    assert [judge_skills(encoder, [chat], [text])["share"] for text in texts] == [1.0, 0.0, 0.0, 1.0]
