"""Makes chats that teach skills instead of facts: to choose and call tools, to think before, to fill JSON, to remember.

What is to be said always stands in the chat itself, so that the one right answer is a pure function of it.
"""

import json
import random
import string
from typing import Any

from demo import phrasings, skill_tools
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
from demo.skill_tools import Parameter, Tool
from demo.skill_values import DRAWS, SKILLS, Value, json_type, spoken, word

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
_TOLD = (
    ("My name is {}.", "What is my name?", "Your name is {}.", "person"),
    ("I live in {}.", "Where do I live?", "You live in {}.", "city"),
    ("My favourite colour is {}.", "What is my favourite colour?", "Your favourite colour is {}.", "colour"),
    ("I am {} years old.", "How old am I?", "You are {} years old.", "age"),
    ("I work as a {}.", "What is my job?", "You work as a {}.", "job"),
    ("Remember the word {}.", "Which word should you remember?", "The word is {}.", "word"),
    ("Remember the number {}.", "Which number should you remember?", "The number is {}.", "number"),
    ("I like {}.", "What do I like?", "You like {}.", "food"),
)
_NOTED = ("I will remember that.", "Noted.", "All right.", "Good to know.")
_SYSTEM = (*SYSTEM_PROMPTS, "You can call functions.", "Use the tools where they help.", "Be brief.")


class SkillMaker:
    """Draws random chats; the same random source gives the same chats."""

    def __init__(self, entries: list[Entry], rng: random.Random, held_out: bool = False) -> None:
        """`entries`: what is asked where no tool is of use. `held_out`: about tools that training never sees."""
        self._entries, self._rng = entries, rng
        self._facts = ChatMaker(entries, rng)
        self._tools = skill_tools.HELD_OUT if held_out else skill_tools.TRAINED
        self._others = skill_tools.TRAINED

    def chat(self) -> Chat:
        """Of a random kind."""
        kinds = {
            self.call: 30,
            self.call_invented: 10,
            self.parallel: 10,
            self.answer_from_result: 15,
            self.no_tool_fits: 10,
            self.fill: 20,
            self.remember: 5,
            self.add: 5,
        }
        return self._rng.choices(list(kinds), list(kinds.values()))[0]()

    def call(self) -> Chat:
        """One call of one of several tools, sometimes with a thought before."""
        tool = self._rng.choice(self._tools)
        form, purpose = self._form(tool)
        text, arguments, _ = self._request(tool, form)
        reply = _calls([(form["function"]["name"], arguments)])
        if self._rng.random() < 0.3:
            name = form["function"]["name"]
            reply["reasoning_content"] = f"{purpose.rstrip('.')}: that is what {name} is for. I call it."
        return Chat([*self._system(), user(text), reply], "tool_call", tools=self._among(form))

    def call_invented(self) -> Chat:
        """A call that the user spells out, of a tool with names that mean nothing."""
        names = [word(self._rng) for _ in range(self._rng.randint(1, 3))]
        kinds = [self._rng.choice(("word", "number", "city", "person", "flag", "colour", "price")) for _ in names]
        arguments = {name: DRAWS[kind](self._rng) for name, kind in zip(names, kinds, strict=True)}
        function = f"{word(self._rng)}_{word(self._rng)}"
        form = _form(function, "", {name: _value_schema(value) for name, value in arguments.items()}, list(arguments))
        told = " and ".join(f"{name} {json.dumps(value)}" for name, value in arguments.items())
        verb = self._rng.choice(("Call", "Use", "Please call", "Run"))
        reply = _calls([(function, arguments)])
        messages = [*self._system(), user(f"{verb} {function} with {told}."), reply]
        return Chat(messages, "invented", tools=self._among(form))

    def parallel(self) -> Chat:
        """Two calls of one tool in one answer."""
        tool = self._rng.choice([one for one in self._tools if len(_places(one.requests[0])) == 1])
        form, _ = self._form(tool)
        function = form["function"]
        argument = next(iter(function["parameters"]["properties"]))
        (place,) = _places(tool.requests[0])
        first, second = self._two(next(one.kind for one in tool.parameters if one.names[0] == place))
        text = tool.requests[0].format(**{place: f"{spoken(first)} and {spoken(second)}"})
        reply = _calls([(function["name"], {argument: first}), (function["name"], {argument: second})])
        return Chat([*self._system(), user(text), reply], "parallel", tools=self._among(form))

    def answer_from_result(self) -> Chat:
        """The sentence that tells what a tool has returned."""
        tool = self._rng.choice(self._tools)
        form, _ = self._form(tool)
        text, arguments, values = self._request(tool, form)
        result = DRAWS[tool.results](self._rng)
        whole = {**arguments, "result": result}
        shown = self._rng.choice((json.dumps({"result": result}), json.dumps(result), str(result), json.dumps(whole)))
        sentence = tool.result
        if not set(_places(sentence)) <= {"result", *values}:
            sentence = "The result is {result}."
        told = sentence.format(**{name: spoken(value) for name, value in values.items()}, result=spoken(result))
        messages = [
            user(text),
            _calls([(form["function"]["name"], arguments)]),
            {"role": "tool", "content": shown},
        ]
        return Chat([*self._system(), *messages, assistant(told)], "tool_answer", tools=self._among(form))

    def no_tool_fits(self) -> Chat:
        """Tools are there, but what is asked wants none of them."""
        form, _ = self._form(self._rng.choice(self._others))
        if self._rng.random() < 0.5:
            fact = self._facts.single(self._rng.choice(self._entries), phrasings.TRAINED)
            return Chat(fact.messages, "no_tool", tools=self._among(form))
        talk = (("Hello!", IDENTITY), ("Hi", IDENTITY), ("Who are you?", IDENTITY), ("Thanks!", THANKS))
        text, told = self._rng.choice((*talk, ("Tell me a joke.", UNKNOWN), ("Write a poem about love.", UNKNOWN)))
        return Chat([*self._system(), user(text), assistant(told)], "no_tool", tools=self._among(form))

    def add(self) -> Chat:
        """A sum or a difference."""
        first, second, sign = self._rng.randint(0, 99), self._rng.randint(0, 99), self._rng.choice("+-")
        total = first + second if sign == "+" else first - second
        asked = self._rng.choice(("What is {}?", "{}", "How much is {}?", "Compute {}.", "{} = ?"))
        shown = self._rng.choice((f"{first} {sign} {second}", f"{first}{sign}{second}"))
        answer = assistant(f"{first} {sign} {second} = {total}")
        return Chat([*self._system(), user(asked.format(shown)), answer], "sum")

    def fill(self) -> Chat:
        """A JSON object: made up, or of facts in the question."""
        noun = self._rng.choice(list(_RECORDS))
        fields = _RECORDS[noun] or {word(self._rng): self._rng.choice(list(DRAWS)) for _ in range(4)}
        chosen = set(self._rng.sample(list(fields), self._rng.randint(1, min(5, len(fields)))))
        record = {key: DRAWS[kind](self._rng) for key, kind in fields.items() if key in chosen}
        schema = json.dumps(_object_schema({key: _value_schema(value) for key, value in record.items()}, self._rng))
        facts = ". ".join(f"The {key.replace('_', ' ')} is {spoken(value)}" for key, value in record.items()) + "."
        template = self._rng.choice(_GENERATE if self._rng.random() < 0.5 else _EXTRACT)
        text = template.format(noun=noun, schema=schema, facts=facts, keys=", ".join(record))
        kind = "made_up" if template in _GENERATE else "extracted"
        return Chat([*self._system(), user(text), assistant(json.dumps(record, ensure_ascii=False))], kind)

    def remember(self) -> Chat:
        """Something that the user has said before."""
        (told, asked, answer, kind), other = self._rng.sample(_TOLD, 2)
        value = spoken(DRAWS[kind](self._rng))
        messages = [user(told.format(value)), assistant(self._rng.choice(_NOTED))]
        if self._rng.random() < 0.4:
            aside = user(other[0].format(spoken(DRAWS[other[3]](self._rng))))
            messages += [aside, assistant(self._rng.choice(_NOTED))]
        return Chat([*self._system(), *messages, user(asked), assistant(answer.format(value))], "remember")

    def _form(self, tool: Tool) -> tuple[dict[str, Any], str]:
        """The tool as a request declares it, with names of this chat, and what it is for."""
        purpose = self._rng.choice(tool.purposes)
        properties = {self._rng.choice(one.names): self._property(one) for one in tool.parameters}
        places = set(_places(" ".join(tool.requests)))
        always = [set(_places(request)) for request in tool.requests]
        required = [
            name
            for name, one in zip(properties, tool.parameters, strict=False)
            if one.names[0] in places and all(one.names[0] in each for each in always)
        ]
        name = self._rng.choice(tool.names)
        return _form(name, purpose if self._rng.random() < 0.9 else "", properties, required, self._rng), purpose

    def _property(self, parameter: Parameter) -> dict[str, Any]:
        found = _value_schema(DRAWS[parameter.kind](self._rng))
        if parameter.choices:
            found["enum"] = list(parameter.choices)
        if parameter.about and self._rng.random() < 0.6:
            found["description"] = parameter.about
        return found

    def _request(self, tool: Tool, form: dict[str, Any]) -> tuple[str, dict[str, Value], dict[str, Value]]:
        """What the user says, and its values by the names that the request gives them and by their own."""
        template = self._rng.choice(tool.requests)
        names = list(form["function"]["parameters"]["properties"])
        arguments: dict[str, Value] = {}
        values: dict[str, Value] = {}
        for name, one in zip(names, tool.parameters, strict=True):
            if one.names[0] in _places(template):
                value = self._rng.choice(one.choices) if one.choices else DRAWS[one.kind](self._rng)
                arguments[name] = values[one.names[0]] = value
        text = template.format(**{name: spoken(value) for name, value in values.items()})
        return text if self._rng.random() < 0.9 else text[0].lower() + text[1:], arguments, values

    def _two(self, kind: str) -> tuple[Value, Value]:
        first = second = DRAWS[kind](self._rng)
        while second == first:
            second = DRAWS[kind](self._rng)
        return first, second

    def _among(self, form: dict[str, Any]) -> list[dict[str, Any]]:
        """The tool and up to three that differ from it."""
        others = self._rng.sample(self._others, self._rng.choice((0, 0, 1, 1, 2, 3)))
        forms = {form["function"]["name"]: form}
        alike = [tool for tool in (*self._tools, *self._others) if form["function"]["name"] in tool.names]
        taken = {name for tool in alike for name in tool.names}
        for tool in others:
            if not taken.intersection(tool.names):
                other, _ = self._form(tool)
                forms.setdefault(other["function"]["name"], other)
        return self._rng.sample(list(forms.values()), len(forms))

    def _system(self) -> list[Message]:
        if self._rng.random() < 0.5:
            return []
        return [{"role": "system", "content": self._rng.choice(_SYSTEM)}]


def _form(
    name: str, purpose: str, properties: dict[str, Any], required: list[str], rng: random.Random | None = None
) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required or rng is None:
        schema["required"] = required
    function: dict[str, Any] = {"name": name, **({"description": purpose} if purpose else {}), "parameters": schema}
    if rng is not None and rng.random() < 0.2:
        schema["additionalProperties"] = False
        function["strict"] = True
    return {"type": "function", "function": function}


def _object_schema(properties: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": properties, "required": list(properties)}
    if rng.random() < 0.5:
        found["additionalProperties"] = False
    return found


def _value_schema(value: Value) -> dict[str, Any]:
    if isinstance(value, list):
        return {"type": "array", "items": {"type": "string"}}
    return {"type": json_type(value)}


def _places(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]


def _calls(calls: list[tuple[str, dict[str, Value]]]) -> Message:
    listed = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": "", "tool_calls": listed}
