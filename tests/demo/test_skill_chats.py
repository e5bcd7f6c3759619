import json
import random

import jsonschema

from demo.conversations import Chat
from demo.dataset import SKILL_ROW_TOKENS, ChatEncoder, skill_chats
from demo.entries import load_entries
from demo.evaluate import judge_skills
from demo.skill_chats import SkillMaker
from demo.skill_tools import HELD_OUT, TRAINED
from demo.skill_values import DRAWS, spoken

ENTRIES = load_entries()[:50]
KINDS = {"tool_call", "invented", "parallel", "tool_answer", "no_tool", "extracted", "made_up", "remember", "sum"}


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
            (asked, *_) = [message["content"] for message in chat.messages if message["role"] == "user"]
            for call, tool in calls(chat):
                jsonschema.validate(call["arguments"], tool["parameters"])
                for value in call["arguments"].values():
                    said = json.dumps(value) if chat.kind == "invented" else spoken(value)
                    assert said.lower() in asked.lower()


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
        asked = chat.messages[-2]["content"]
        schema, _ = decoder.raw_decode(asked[asked.index('{"type": "object"') :])
        jsonschema.validate(json.loads(chat.messages[-1]["content"]), schema)


def test_held_out_tools_are_never_trained():
    trained = {name for tool in TRAINED for name in tool.names}
    assert not trained & {name for tool in HELD_OUT for name in tool.names}
    for tool in (*TRAINED, *HELD_OUT):
        assert {parameter.kind for parameter in tool.parameters} | {tool.results} <= set(DRAWS)


def test_most_fit_a_row():
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
