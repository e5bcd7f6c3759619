"""How a tool is declared in a request, and what a user says who wants it, with the arguments that follow from it.

Names and descriptions are drawn from what the tool may be called. Knows no chats.
"""

import random
import string
from typing import Any

from demo.skill_tools import Parameter, Tool
from demo.skill_values import DRAWS, Value, json_type, spoken

Form = dict[str, Any]
"""A tool as `tools` of a request has it."""
_LISTED = {"city", "country", "person", "number", "ticker", "file", "folder", "food", "room", "word", "product"}
"""Kinds of values of which several may stand in one sentence, parted by commas and "and"."""


def declared(rng: random.Random, tool: Tool) -> Form:
    """The tool with names of this chat, most often with what it is for."""
    purpose = rng.choice(tool.purposes) if rng.random() < 0.9 else ""
    properties = {rng.choice(one.names): _property(rng, one) for one in tool.parameters}
    always = [set(_places(request)) for request in tool.requests]
    required = [
        name
        for name, one in zip(properties, tool.parameters, strict=True)
        if all(one.names[0] in each for each in always)
    ]
    name = rng.choice(tool.names)
    return declaration(name, purpose, properties, required, rng)


def declaration(
    name: str, purpose: str, properties: dict[str, Any], required: list[str], rng: random.Random | None = None
) -> Form:
    """A function of these parts. `rng` makes some of them strict."""
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required or rng is None:
        schema["required"] = required
    function: dict[str, Any] = {"name": name, **({"description": purpose} if purpose else {}), "parameters": schema}
    if rng is not None and rng.random() < 0.2:
        schema["additionalProperties"] = False
        function["strict"] = True
    return {"type": "function", "function": function}


def value_schema(value: Value) -> dict[str, Any]:
    """The JSON Schema of values such as this one."""
    if isinstance(value, list):
        return {"type": "array", "items": {"type": "string"}}
    return {"type": json_type(value)}


def request_for(
    rng: random.Random, tool: Tool, form: Form, template: str = "", fixed: dict[str, str] | None = None
) -> tuple[str, dict[str, Value], dict[str, Value]]:
    """What the user says, and its values by the names of the declaration and by the tool's own.

    `template`: the request, if it is not to be drawn; `fixed`: what places of it say instead of their value.
    """
    template = template or rng.choice(tool.requests)
    values: dict[str, Value] = {}
    for one in tool.parameters:
        if one.names[0] in _places(template):
            values[one.names[0]] = rng.choice(one.choices) if one.choices else DRAWS[one.kind](rng)
    text = template.format(**{place: spoken(value) for place, value in values.items()} | (fixed or {}))
    arguments = {name: values[place] for name, place in _names(tool, form) if place in values}
    return text if rng.random() < 0.9 else text[0].lower() + text[1:], arguments, values


def request_for_several(rng: random.Random, tool: Tool, form: Form) -> tuple[str, list[dict[str, Value]]] | None:
    """A request for two or three values of one parameter, and the arguments of each call; None: it takes no such."""
    fixed = set(_places(" ".join(tool.requests)))
    listed = [one for one in tool.parameters if one.kind in _LISTED and not one.choices and one.names[0] in fixed]
    if not listed:
        return None
    chosen = rng.choice(listed)
    place = chosen.names[0]
    amount, drawn = rng.choice((2, 2, 2, 3)), list[Value]()
    while len(drawn) < amount:
        value = DRAWS[chosen.kind](rng)
        drawn += [value] if value not in drawn else []
    template = rng.choice([one for one in tool.requests if place in _places(one)])
    text, arguments, _ = request_for(rng, tool, form, template, {place: spoken([str(one) for one in drawn])})
    (argument,) = [name for name, own in _names(tool, form) if own == place]
    return text, [arguments | {argument: value} for value in drawn]


def by_places(tool: Tool, form: Form, arguments: dict[str, Value]) -> dict[str, Value]:
    """Arguments by the tool's own names of its parameters."""
    return {place: arguments[name] for name, place in _names(tool, form) if name in arguments}


def _property(rng: random.Random, parameter: Parameter) -> dict[str, Any]:
    found = value_schema(DRAWS[parameter.kind](rng))
    if parameter.choices:
        found["enum"] = list(parameter.choices)
    if parameter.about and rng.random() < 0.6:
        found["description"] = parameter.about
    return found


def _names(tool: Tool, form: Form) -> list[tuple[str, str]]:
    """Each parameter's name in this declaration, and the tool's own."""
    own = [one.names[0] for one in tool.parameters]
    return list(zip(form["function"]["parameters"]["properties"], own, strict=True))


def _places(template: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(template) if name]
