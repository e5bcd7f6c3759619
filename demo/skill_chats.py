"""Makes chats that teach skills instead of facts: to choose and call tools, to think before, to fill JSON, to remember.

What is to be said always stands in the chat itself, so that the one right answer is a pure function of it.
"""

import json
import random
from typing import Any

from demo import phrasings, skill_tools, stated_records
from demo.composed_tools import composed
from demo.conversations import (
    IDENTITY,
    SYSTEM_PROMPTS,
    THANKS,
    UNKNOWN,
    Chat,
    ChatMaker,
    Message,
    assistant,
    user,
)
from demo.entries import Entry
from demo.out_of_scope import OutOfScope
from demo.skill_tools import Tool
from demo.skill_values import DRAWS, SKILLS, Value, spoken, word
from demo.tool_requests import Form, by_places, declaration, declared, request_for, request_for_several, value_schema
from demo.tool_results import result_and_sentence

_RECORDS: dict[str, dict[str, str]] = SKILLS["records"]
_GENERATE = (
    "Give me an example of a JSON {noun} that fits this schema: {schema}",
    "Generate a JSON {noun}. The schema is {schema}",
    "Answer in JSON only. Make up a {noun} for this JSON schema:\n{schema}",
    "Return a {noun} as JSON object with this schema: {schema}",
    "Create a {noun} in JSON that conforms to the schema {schema}",
)
_EXTRACT = (
    "Extract the {noun} as JSON: {facts}",
    "Extract the {noun} from this text: {facts}",
    "{facts}\n\nGive me the {noun} in JSON.",
    "Turn this into a JSON object with the keys {keys}: {facts}",
    "{facts}\nAnswer with JSON that fits {schema}",
    "JSON, please. {facts} The schema: {schema}",
)
_STATEMENTS = (
    ("My name is {}.", "What is my name?", "Your name is {}.", "person"),
    ("I live in {}.", "Where do I live?", "You live in {}.", "city"),
    ("My favourite colour is {}.", "What is my favourite colour?", "Your favourite colour is {}.", "colour"),
    ("I am {} years old.", "How old am I?", "You are {} years old.", "age"),
    ("I work as a {}.", "What is my job?", "You work as a {}.", "job"),
    ("Remember the word {}.", "Which word should you remember?", "The word is {}.", "word"),
    ("Remember the number {}.", "Which number should you remember?", "The number is {}.", "number"),
    ("I like {}.", "What do I like?", "You like {}.", "food"),
)
_POEMS = ("Tell me a joke.", "Write a poem about love.", "Tell me a story.", "Write a haiku.", "How are you?")
"""What no tool and no documentation helps with."""
_NOTED = ("I will remember that.", "Noted.", "All right.", "Good to know.")
_COMPOSED_SHARE = 0.6
"""Of tools: of those that are put together anew."""
_SYSTEM = (*SYSTEM_PROMPTS, "You can call functions.", "Use the tools where they help.", "Be brief.")


class SkillMaker:
    """Draws random chats; the same random source gives the same chats."""

    def __init__(self, entries: list[Entry], rng: random.Random, held_out: bool = False) -> None:
        """`entries`: what is asked where no tool is of use. `held_out`: about tools that training never sees."""
        self._entries, self._rng = entries, rng
        self._questions = ChatMaker(entries, rng)
        self._tools = skill_tools.HELD_OUT if held_out else skill_tools.TRAINED
        self._others = skill_tools.TRAINED
        self._held_out = held_out
        self._out_of_scope = OutOfScope(entries, rng, held_out)

    def chat(self) -> Chat:
        """Of a random kind."""
        kinds = {
            self.call: 30,
            self.call_invented: 10,
            self.parallel: 12,
            self.answer_from_result: 24,
            self.no_tool_fits: 10,
            self.look_up: 16,
            self.fill: 20,
            self.fill_from_sentences: 28,
            self.recall: 5,
            self.calculate: 16,
            self.decline: 20,
        }
        return self._rng.choices(list(kinds), list(kinds.values()))[0]()

    def call(self) -> Chat:
        """One call of one of several tools, sometimes with a thought before."""
        tool = self._tool()
        form = declared(self._rng, tool)
        text, arguments, _ = request_for(self._rng, tool, form)
        name = form["function"]["name"]
        reply = _calls([(name, arguments)])
        if self._rng.random() < 0.3:
            purpose = form["function"].get("description", "What is asked for").rstrip(".")
            reply["reasoning_content"] = f"{purpose}: that is what {name} is for. I call it."
        return Chat([*self._before(), user(text), reply], "tool_call", tools=self._among(form))

    def call_invented(self) -> Chat:
        """A call that the user spells out, of a tool with names that mean nothing."""
        names = [word(self._rng) for _ in range(self._rng.randint(1, 3))]
        kinds = [self._rng.choice(("word", "number", "city", "person", "flag", "colour", "price")) for _ in names]
        arguments = {name: DRAWS[kind](self._rng) for name, kind in zip(names, kinds, strict=True)}
        function = f"{word(self._rng)}_{word(self._rng)}"
        form = declaration(
            function, "", {name: value_schema(value) for name, value in arguments.items()}, list(arguments)
        )
        sentence = " and ".join(f"{name} {json.dumps(value)}" for name, value in arguments.items())
        verb = self._rng.choice(("Call", "Use", "Please call", "Run"))
        reply = _calls([(function, arguments)])
        messages = [*self._system(), user(f"{verb} {function} with {sentence}."), reply]
        return Chat(messages, "invented", tools=self._among(form))

    def parallel(self) -> Chat:
        """Two or three calls in one answer: of one tool with several values, or of two tools."""
        if self._rng.random() < 0.3:
            return self._two_tools()
        text, calls, form, _ = self._several()
        return Chat([*self._before(), user(text), _calls(calls)], "parallel", tools=self._among(form))

    def answer_from_result(self) -> Chat:
        """The sentence that tells what a tool has returned, or one for each of several calls."""
        if self._rng.random() < 0.2:
            return self._answer_from_results()
        tool = self._tool()
        form = declared(self._rng, tool)
        text, arguments, values = request_for(self._rng, tool, form)
        shown, sentence = result_and_sentence(self._rng, tool, arguments, values)
        messages = [user(text), _calls([(form["function"]["name"], arguments)]), _returned(shown)]
        return Chat([*self._before(), *messages, assistant(sentence)], "tool_answer", tools=self._among(form))

    def no_tool_fits(self) -> Chat:
        """Tools are there, but what is asked wants none of them."""
        form = declared(self._rng, self._rng.choice(self._others))
        if self._rng.random() < 0.5:
            fact = self._questions.single(self._rng.choice(self._entries), phrasings.TRAINED)
            return Chat(fact.messages, "no_tool", tools=self._among(form))
        talk = (("Hello!", IDENTITY), ("Hi", IDENTITY), ("Who are you?", IDENTITY), ("Thanks!", THANKS))
        text, sentence = self._rng.choice(talk) if self._rng.random() < 0.6 else (self._rng.choice(_POEMS), UNKNOWN)
        return Chat([*self._system(), user(text), assistant(sentence)], "no_tool", tools=self._among(form))

    def look_up(self) -> Chat:
        """A name of Python's library, looked up by a tool for that, whatever other tools there are."""
        chat = self._questions.tool_use(self._rng.choice(self._entries))
        assert chat.tools is not None
        (form,) = chat.tools
        question = next(message for message in chat.messages if message["role"] == "user")
        question["content"] += self._rng.choice(("", "", " Look it up.", " Look it up, please."))
        return Chat(chat.messages, "look_up", tools=self._among(form))

    def calculate(self) -> Chat:
        """A sum, a difference or a small product, sometimes with the steps as a thought."""
        most = self._rng.choice((20, 99))
        first, second, operator = self._rng.randint(0, most), self._rng.randint(0, most), self._rng.choice("++--*")
        if operator == "*":
            first, second = first % 13, second % 13
        total = {"+": first + second, "-": first - second, "*": first * second}[operator]
        question = self._rng.choice(("What is {}?", "{}", "How much is {}?", "Compute {}.", "{} = ?"))
        shown = self._rng.choice((f"{first} {operator} {second}", f"{first}{operator}{second}"))
        reply = assistant(f"{first} {operator} {second} = {total}")
        if operator != "*" and self._rng.random() < 0.3:
            reply["reasoning_content"] = _steps(first, second, operator)
        return Chat([*self._system(), user(question.format(shown)), reply], "sum")

    def fill(self) -> Chat:
        """A JSON object: made up, or of facts in the question."""
        noun = self._rng.choice(list(_RECORDS))
        fields = _RECORDS[noun] or {word(self._rng): self._rng.choice(list(DRAWS)) for _ in range(4)}
        chosen = set(self._rng.sample(list(fields), self._rng.randint(1, min(5, len(fields)))))
        record = {key: DRAWS[kind](self._rng) for key, kind in fields.items() if key in chosen}
        schema = json.dumps(_object_schema({key: value_schema(value) for key, value in record.items()}, self._rng))
        sentences = ". ".join(f"The {key.replace('_', ' ')} is {spoken(value)}" for key, value in record.items()) + "."
        template = self._rng.choice(_GENERATE if self._rng.random() < 0.5 else _EXTRACT)
        text = template.format(noun=noun, schema=schema, facts=sentences, keys=", ".join(record))
        kind = "made_up" if template in _GENERATE else "extracted"
        return Chat([*self._system(), user(text), assistant(json.dumps(record, ensure_ascii=False))], kind)

    def fill_from_sentences(self) -> Chat:
        """A JSON object whose values plain sentences state; sometimes one whose values are made up."""
        kind = "stated" if self._rng.random() < 0.85 else "invented_record"
        draw = stated_records.stated if kind == "stated" else stated_records.made_up
        system, text, found = draw(self._rng)
        before = [{"role": "system", "content": system}] if system else []
        return Chat([*before, user(text), assistant(stated_records.written(found))], kind)

    def decline(self) -> Chat:
        """A question that neither the library nor anything said before answers."""
        return self._questions.declined(self._out_of_scope)

    def recall(self) -> Chat:
        """Something that the user has said before."""
        (statement, question, answer, kind), other = self._rng.sample(_STATEMENTS, 2)
        value = spoken(DRAWS[kind](self._rng))
        messages = [user(statement.format(value)), assistant(self._rng.choice(_NOTED))]
        if self._rng.random() < 0.4:
            aside = user(other[0].format(spoken(DRAWS[other[3]](self._rng))))
            messages += [aside, assistant(self._rng.choice(_NOTED))]
        return Chat([*self._system(), *messages, user(question), assistant(answer.format(value))], "remember")

    def _tool(self) -> Tool:
        if self._rng.random() < _COMPOSED_SHARE:
            return composed(self._rng, self._held_out)
        return self._rng.choice(self._tools)

    def _several(self) -> tuple[str, list[tuple[str, dict[str, Value]]], Form, Tool]:
        """A request for two or three values of one parameter, its calls, and the tool with its declaration."""
        while True:
            tool = self._tool()
            form = declared(self._rng, tool)
            if found := request_for_several(self._rng, tool, form):
                text, arguments = found
                return text, [(form["function"]["name"], one) for one in arguments], form, tool

    def _two_tools(self) -> Chat:
        first, second = self._tool(), self._tool()
        while set(first.names) & set(second.names):
            second = self._tool()
        forms = [declared(self._rng, tool) for tool in (first, second)]
        texts, calls = [], []
        for tool, form in zip((first, second), forms, strict=True):
            text, arguments, _ = request_for(self._rng, tool, form)
            texts.append(text if text[-1] in ".?!" else f"{text}.")
            calls.append((form["function"]["name"], arguments))
        tools = self._rng.sample(forms, 2)
        return Chat([*self._before(), user(" ".join(texts)), _calls(calls)], "parallel", tools=tools)

    def _answer_from_results(self) -> Chat:
        text, calls, form, tool = self._several()
        (changing,) = [name for name in calls[0][1] if calls[0][1][name] != calls[1][1][name]]
        results, sentences = [], []
        for _, arguments in calls:
            shown, sentence = result_and_sentence(self._rng, tool, arguments, by_places(tool, form, arguments))
            results.append(_returned(shown))
            sentences.append(f"{spoken(arguments[changing])}: {sentence}")
        messages = [user(text), _calls(calls), *results, assistant("\n".join(sentences))]
        return Chat([*self._before(), *messages], "tool_answer", tools=self._among(form))

    def _among(self, form: dict[str, Any]) -> list[dict[str, Any]]:
        """The tool and up to three that differ from it."""
        amount = self._rng.choice((0, 0, 1, 1, 2, 3))
        others = [self._other() for _ in range(amount)]
        forms = {form["function"]["name"]: form}
        alike = [tool for tool in (*self._tools, *self._others) if form["function"]["name"] in tool.names]
        used = {name for tool in alike for name in tool.names}
        for tool in others:
            if not used.intersection(tool.names):
                other = declared(self._rng, tool)
                forms.setdefault(other["function"]["name"], other)
                used.update(tool.names)
        return self._rng.sample(list(forms.values()), len(forms))

    def _other(self) -> Tool:
        """A tool that stands beside the one that is called."""
        return composed(self._rng) if self._rng.random() < 0.5 else self._rng.choice(self._others)

    def _before(self) -> list[Message]:
        """A system prompt or none, and sometimes small talk."""
        if self._rng.random() < 0.85:
            return self._system()
        return [*self._system(), user(self._rng.choice(("Hello!", "Hi", "Who are you?"))), assistant(IDENTITY)]

    def _system(self) -> list[Message]:
        if self._rng.random() < 0.5:
            return []
        return [{"role": "system", "content": self._rng.choice(_SYSTEM)}]


def _object_schema(properties: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": properties, "required": list(properties)}
    if rng.random() < 0.5:
        found["additionalProperties"] = False
    return found


def _steps(first: int, second: int, operator: str) -> str:
    """How a sum or difference is found: tens, then ones."""
    tens, ones = second - second % 10, second % 10
    between = first + tens if operator == "+" else first - tens
    last = between + ones if operator == "+" else between - ones
    return f"{first} {operator} {tens} = {between}. {between} {operator} {ones} = {last}."


def _returned(shown: str) -> Message:
    return {"role": "tool", "content": shown}


def _calls(calls: list[tuple[str, dict[str, Value]]]) -> Message:
    listed = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": "", "tool_calls": listed}
