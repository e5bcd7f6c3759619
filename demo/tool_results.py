"""How what a tool returns is shown to the model, and the one sentence that tells it, which follows from it alone.

An answer that only a person who knows the tool could phrase cannot be learned for tools that training never saw.
"""

import json
import random

from demo.skill_tools import Tool
from demo.skill_values import DRAWS, Value, spoken, word

_MORE_KINDS = ("number", "word", "count", "price", "person", "colour", "date")


def result_and_sentence(
    rng: random.Random, tool: Tool, arguments: dict[str, Value], values: dict[str, Value]
) -> tuple[str, str]:
    """What the tool returns and what is said then. `values`: what was asked for, by the tool's own names.

    A sentence is said as it is, a bare value is "the result", and of an object every field is told that is no argument.
    """
    value = DRAWS[tool.results](rng)
    form = rng.choice(("sentence", "bare", "object", "object", "object"))
    if form == "sentence":
        spoken_values = {one.names[0]: spoken(values.get(one.names[0], "it")) for one in tool.parameters}
        sentence = tool.result.format(**spoken_values, result=spoken(value))
        return rng.choice((sentence, json.dumps(sentence))), sentence
    if form == "bare":
        return rng.choice((str(value), json.dumps(value))), f"The result is {spoken(value)}."
    extra = {rng.choice([name for name in tool.fields if name not in arguments] or ["result"]): value}
    for _ in range(rng.choice((0, 0, 1, 2))):
        extra.setdefault(word(rng), DRAWS[rng.choice(_MORE_KINDS)](rng))
    shown = arguments | extra if rng.random() < 0.3 else extra
    return json.dumps(shown), " ".join(_sentence(name, one) for name, one in extra.items())


def _sentence(name: str, value: Value) -> str:
    return f"The {name.replace('_', ' ')} is {spoken(value)}."
