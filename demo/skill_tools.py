"""Tools that the demo model learns to call: what they are named, what they take, and what people say who want them.

Names and descriptions vary from chat to chat, so that the model reads them instead of knowing them.
"""

import msgspec

from demo.skill_values import SKILLS


class Parameter(msgspec.Struct, frozen=True):
    """One argument."""

    names: list[str]
    kind: str
    """A key of `skill_values.DRAWS`."""
    choices: list[str] = []
    """Its enum; empty: none."""
    about: str = ""


class Tool(msgspec.Struct, frozen=True):
    """One domain."""

    names: list[str]
    purposes: list[str]
    parameters: list[Parameter]
    requests: list[str]
    """Each has a place in braces for a parameter, by its first name; what has none in it is left out of the call."""
    fields: tuple[str, ...] = ("result",)
    """What its result may be named where it returns an object."""
    result: str = "The result is {result}."
    """What it returns where that is a sentence, with places for parameters and `{result}`."""
    results: str = "number"
    """The kind of its result."""


TRAINED: list[Tool] = msgspec.convert(SKILLS["tools"], list[Tool])
HELD_OUT: list[Tool] = msgspec.convert(SKILLS["held_out_tools"], list[Tool])
"""Never trained: they measure whether the model reads."""
