"""Tools put together anew for each chat, so that a model has to read what they are named and for instead of knowing it.

A tool tells something of a thing (`get_altitude(city)`) or does something to it (`lock_room(room, mode)`); some of the
words mean nothing. Knows no chats.
"""

import random

from demo.skill_tools import Parameter, Tool
from demo.skill_values import SKILLS, word

_PARTS = SKILLS["composed"]
_THINGS: dict[str, str] = _PARTS["things"]
_INVENTED_SHARE, _OPTION_SHARE = 0.3, 0.5


def composed(rng: random.Random, held_out: bool = False) -> Tool:
    """A tool of a random form. `held_out`: of words that are kept for measuring."""
    thing, kind = _thing(rng)
    subject = Parameter(
        names=_written([thing, f"{thing} name", f"{thing} id", f"the {thing}"]), kind=kind, about=f"The {thing}"
    )
    option = rng.choice(_PARTS["options"]) if rng.random() < _OPTION_SHARE else None
    is_question = rng.random() < 0.5
    noun, verb = _word(rng, "nouns", held_out), _word(rng, "verbs", held_out)
    patterns = _PARTS["questions" if is_question else "orders"]
    parts = {"noun": noun, "verb": verb, "thing": thing, "it": "{" + subject.names[0] + "}"}
    tails = ["", "", option["say"]] if option else [""]
    requests = [pattern.format(**parts, more=tail) for pattern in patterns for tail in tails]
    parameters = [subject]
    if option:
        parameters.append(Parameter(names=option["names"], kind=option["kind"], choices=option.get("choices", [])))
    return Tool(
        names=_names_of_question(noun, thing) if is_question else _names_of_order(verb, thing),
        purposes=[line.format(**parts) for line in (_QUESTIONS if is_question else _DONE)],
        parameters=parameters,
        requests=[request[0].upper() + request[1:] for request in requests],
        fields=tuple(_written([noun])) if is_question else ("status", "result", "state"),
        result=f"The {noun} of {parts['it']} is {{result}}."
        if is_question
        else f"It is {{result}}: {verb} {parts['it']}.",
        results=rng.choice(
            ("number", "price", "word", "count", "person", "date") if is_question else ("word", "number")
        ),
    )


_QUESTIONS = ("Get the {noun} of a {thing}.", "Returns the {noun} of the given {thing}", "The {noun} of a {thing}.")
_DONE = ("Can {verb} a {thing}.", "To {verb} a {thing}", "A tool to {verb} one {thing}.")


def _thing(rng: random.Random) -> tuple[str, str]:
    if rng.random() < _INVENTED_SHARE:
        return word(rng), rng.choice(("word", "number", "person", "city"))
    return rng.choice(list(_THINGS.items()))


def _word(rng: random.Random, of: str, held_out: bool) -> str:
    if rng.random() < _INVENTED_SHARE:
        return word(rng)
    chosen: str = rng.choice(_PARTS[f"held_out_{of}" if held_out else of])
    return chosen


def _names_of_question(noun: str, thing: str) -> list[str]:
    plain = [f"get {noun}", f"{noun} of", f"{thing} {noun}", f"fetch {noun}", f"read {noun}", f"{noun} lookup", noun]
    return [*_written(plain), f"get{_joined(noun)}", f"find{_joined(noun)}"]


def _names_of_order(verb: str, thing: str) -> list[str]:
    return [*_written([f"{verb} {thing}", verb, f"{thing} {verb}", f"do {verb}"]), f"{verb.split()[0]}{_joined(thing)}"]


def _written(names: list[str]) -> list[str]:
    """As identifiers."""
    return [name.replace(" ", "_") for name in names]


def _joined(words: str) -> str:
    return "".join(part.capitalize() for part in words.split())
