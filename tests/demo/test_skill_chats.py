import json
import random
import re

import jsonschema

from demo.composed_tools import composed
from demo.conversations import Chat
from demo.dataset import SKILL_ROW_TOKENS, ChatEncoder, skill_chats
from demo.entries import load_entries
from demo.evaluate import judge_skills
from demo.skill_chats import SkillMaker
from demo.skill_tools import HELD_OUT, TRAINED
from demo.skill_values import DRAWS, SKILLS, spoken

ENTRIES = load_entries()[:50]
KINDS = {"tool_call", "invented", "parallel", "tool_answer", "no_tool", "extracted", "made_up", "remember", "sum"}
KINDS |= {"look_up", "stated", "invented_record", "out_of_scope"}


def calls(chat: Chat) -> list[tuple[dict, dict]]:
    """Each call with the declaration of its tool."""
    declared = {tool["function"]["name"]: tool["function"] for tool in chat.tools or []}
    made = [call["function"] for message in chat.messages for call in message.get("tool_calls", [])]
    return [(call, declared[call["name"]]) for call in made]


def test_all_kinds_are_drawn_and_the_same_seed_draws_the_same():
    chats = skill_chats(ENTRIES, 5, 500)
    assert {chat.kind for chat in chats} == KINDS
    assert [chat.messages for chat in chats] == [chat.messages for chat in skill_chats(ENTRIES, 5, 500)]


def test_calls_fit_their_schemas_and_say_what_the_user_said():
    for held_out in (False, True):
        for chat in skill_chats(ENTRIES, 6, 600, held_out):
            request_for = "\n".join(message["content"] for message in chat.messages if message["role"] == "user")
            for call, tool in calls(chat):
                jsonschema.validate(call["arguments"], tool["parameters"])
                for value in call["arguments"].values():
                    spoken_value = json.dumps(value) if chat.kind == "invented" else spoken(value)
                    assert spoken_value.lower() in request_for.lower()


def test_every_stated_value_is_in_the_result_or_the_call():
    """So that it can be learned by copying, whatever the tool."""
    glue = {"The", "result", "is", "and"}
    for held_out in (False, True):
        for chat in skill_chats(ENTRIES, 11, 600, held_out):
            if chat.kind == "tool_answer":
                results = " ".join(m["content"] for m in chat.messages if m["role"] == "tool").replace("_", " ")
                called = " ".join(spoken(value) for call, _ in calls(chat) for value in call["arguments"].values())
                for word in re.findall(r"\w+", chat.messages[-1]["content"]):
                    assert word in glue or word in results + called, chat.messages


def test_several_calls_are_several_and_differ():
    chats = [
        chat
        for is_held_out in (False, True)
        for chat in skill_chats(ENTRIES, 12, 600, is_held_out)
        if chat.kind == "parallel"
    ]
    numbers = set()
    for chat in chats:
        made = [(call["name"], json.dumps(call["arguments"])) for call, _ in calls(chat)]
        assert len(made) == len(set(made))
        numbers.add((len(made), len({name for name, _ in made})))
    assert numbers == {(2, 1), (3, 1), (2, 2)}


def test_a_thought_before_a_call_says_of_a_tool_what_its_declaration_says():
    for chat in skill_chats(ENTRIES, 16, 600):
        thought = chat.messages[-1].get("reasoning_content", "")
        if thought and chat.kind == "tool_call":
            ((call, tool),) = calls(chat)
            purpose = tool.get("description", "What is asked for").rstrip(".")
            assert thought == f"{purpose}: that is what {call['name']} is for. I call it."


def test_thoughts_about_sums_end_in_the_answer():
    thoughts = 0
    for chat in skill_chats(ENTRIES, 13, 2000):
        reply = chat.messages[-1]
        if chat.kind == "sum":
            left, right = reply["content"].split(" = ")
            assert eval(left) == int(right)
            thought = reply.get("reasoning_content")
            thoughts += thought is not None
            for step in re.findall(r"[^.]+ = -?\d+", thought or ""):
                assert eval(step.replace("=", "=="))
            assert thought is None or thought.endswith(f" = {right}.")
    assert thoughts > 10


def test_a_name_is_looked_up_where_a_tool_for_that_stands_among_others():
    chats = [chat for chat in skill_chats(ENTRIES, 14, 1000) if chat.kind == "look_up"]
    assert any(len(chat.tools or []) > 1 for chat in chats)
    for chat in chats:
        ((call, tool),) = calls(chat)
        assert next(iter(call["arguments"].values())) in {entry.name for entry in ENTRIES}
        assert "Python" in tool["description"]


def test_an_answer_without_tools_has_none_that_would_help():
    maker = SkillMaker(ENTRIES, random.Random(7))
    for _ in range(200):
        chat = maker.no_tool_fits()
        assert chat.tools
        assert not calls(chat)


def test_json_has_the_keys_and_types_of_its_schema():
    chats = [chat for chat in skill_chats(ENTRIES, 8, 1000) if chat.kind == "made_up"]
    decoder = json.JSONDecoder()
    for chat in chats:
        request_for = chat.messages[-2]["content"]
        schema, _ = decoder.raw_decode(request_for[request_for.index('{"type": "object"') :])
        jsonschema.validate(json.loads(chat.messages[-1]["content"]), schema)


def test_held_out_tools_are_never_trained():
    trained = {name for tool in TRAINED for name in tool.names}
    assert not trained & {name for tool in HELD_OUT for name in tool.names}
    for tool in (*TRAINED, *HELD_OUT):
        assert {parameter.kind for parameter in tool.parameters} | {tool.results} <= set(DRAWS)


def test_tools_put_together_are_called_what_their_words_are_and_held_out_words_are_never_trained():
    rng = random.Random(15)
    parts = SKILLS["composed"]
    for words in ("nouns", "verbs"):
        assert not set(parts[words]) & set(parts[f"held_out_{words}"])
    fixed = {name for tool in (*TRAINED, *HELD_OUT) for name in tool.names}
    kept = {word.replace(" ", "_") for words in ("held_out_nouns", "held_out_verbs") for word in parts[words]}
    for _ in range(3000):
        tool = composed(rng)
        assert not fixed & set(tool.names), fixed & set(tool.names)
        assert not kept & {part for name in tool.names for part in (name, *name.split("_"))}
        places = [parameter.names[0] for parameter in tool.parameters]
        assert len(set(places)) == len(places)
        for request in tool.requests:
            assert request.format(**dict.fromkeys(places, "x")), request


def test_most_skill_chats_fit_a_training_row():
    encoder = ChatEncoder()
    lengths = [len(ids) for ids in encoder.encode_many([encoder.render(chat) for chat in skill_chats(ENTRIES, 9, 300)])]
    assert sum(length <= SKILL_ROW_TOKENS for length in lengths) >= 299


def test_judged_is_the_whole_answer_and_of_made_up_json_its_form():
    encoder = ChatEncoder()
    chats = skill_chats(ENTRIES, 10, 200)
    right = []
    for chat in chats:
        thinks = "reasoning_content" in chat.messages[-1]
        prompt = encoder.render(chat, prompt_only=True, enable_thinking=thinks)
        right.append(encoder.render(chat).removeprefix(prompt).removesuffix("<|im_end|>\n"))
    assert judge_skills(encoder, chats, right)["share"] == 1.0
    assert judge_skills(encoder, chats, ["no"] * len(chats))["share"] == 0.0
    (chat, *_) = [chat for chat in chats if chat.kind == "made_up"]
    other = {key: type(value)() for key, value in json.loads(chat.messages[-1]["content"]).items()}
    assert judge_skills(encoder, [chat], [json.dumps(other)])["share"] == 1.0
    assert judge_skills(encoder, [chat], [json.dumps(other | {"more": 1})])["share"] == 0.0
