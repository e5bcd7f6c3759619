"""Makes questions that want JSON from plain sentences, and the JSON that those sentences state.

The keys are drawn from what schemas usually call a field, and half of the questions do not name them: a server that
holds the answer to a schema forces the keys, so what is to be learned is which words are each key's value.
"""

import json
import random
import string
from typing import Any

import yaml

from demo.entries import DATA
from demo.skill_values import DRAWS, Value, spoken

_RECORDS: dict[str, Any] = yaml.safe_load((DATA / "stated_records.yaml").read_text(encoding="utf-8"))
_FEELINGS: dict[str, Any] = _RECORDS.pop("feelings")
_REQUESTS = (
    "Extract the {noun}: {text}",
    "Extract the {noun} as JSON: {text}",
    "Extract the {noun} from this text.\n\n{text}",
    "{text} Answer in JSON.",
    "{text}\n\nReturn the {noun} as JSON.",
    "Parse this into JSON: {text}",
    "Return JSON. {text}",
    "Turn the following into a {noun}: {text}",
    "Fill the form. {text}",
    "Which {noun} is this? {text}",
)
_REQUESTS_WITH_KEYS = (
    "Extract {keys} from: {text}",
    "{text}\n\nReturn a JSON object with {keys}.",
    "{text} Give me {keys} as JSON.",
    "JSON with the keys {keys}, please: {text}",
    "Extract {keys}.\n{text}",
)
_MADE_UP = (
    "Give me a {noun} as JSON with {keys}.",
    "Make up a {noun} with {keys}.",
    "Generate a JSON object for a {noun} with {keys}.",
    "Create a {noun}: {keys}.",
    "Return a JSON object with {keys}.",
    "Invent a {noun}.",
    "Give me an example of a {noun} in JSON.",
    "Describe a {noun} as JSON.",
)
_FEELING_REQUESTS = (
    "Classify: {text}",
    "What is the sentiment of this text? {text}",
    "Is this positive, negative or neutral? {text}",
    "Classify the sentiment of this review: {text}",
    "{text}\n\nWhat is the {key}?",
)
_SYSTEM = (
    "",
    "",
    "",
    "You extract data as JSON.",
    "Answer in JSON.",
    "You are a helpful assistant.",
    "Extract the data.",
)

Question = tuple[str, str, dict[str, Any]]
"""A system prompt (or none), what the user says, and the object that is the right answer."""


def stated(rng: random.Random) -> Question:
    """Returns a question whose text states every value of the answer."""
    draw = rng.random()
    if draw < 0.15:
        return _feeling(rng)
    record = rng.choice(list(_RECORDS.values()))
    if draw < 0.3:
        return _list_of(record, rng)
    text, values = _sentence(record, rng)
    names_keys = rng.random() < 0.4
    amount = rng.randint(1, len(values)) if names_keys and rng.random() < 0.5 else len(values)
    found = {_key(record, name, rng): values[name] for name in rng.sample(list(values), amount)}
    request = _request(record, text, list(found) if names_keys else [], rng)
    return rng.choice(_SYSTEM), request, _nested(found, record, rng)


def made_up(rng: random.Random) -> Question:
    """Returns a question that leaves the values of a record to the model."""
    record = rng.choice(list(_RECORDS.values()))
    fields = record["fields"]
    names = rng.sample(list(fields), rng.randint(1, min(4, len(fields))))
    found = {_key(record, name, rng): DRAWS[fields[name]["kind"]](rng) for name in names}
    template = rng.choice(_MADE_UP)
    return rng.choice(_SYSTEM), template.format(noun=rng.choice(record["nouns"]), keys=_listed(list(found))), found


def _list_of(record: dict[str, Any], rng: random.Random) -> Question:
    """A text with two or three sentences of one pattern, whose answer is a list of objects under one key."""
    pattern = rng.choice(record["patterns"])
    amount = rng.choice((2, 2, 3))
    sentences = [_sentence(record, rng, pattern) for _ in range(amount)]
    keys = {name: _key(record, name, rng) for name in sentences[0][1]}
    objects = [{keys[name]: value for name, value in values.items()} for _, values in sentences]
    noun = rng.choice(record["nouns"])
    found = {rng.choice((f"{noun.replace(' ', '_')}s", "items", "results", "data")): objects}
    named = list(keys.values()) if rng.random() < 0.4 else []
    text = _request(record, " ".join(sentence for sentence, _ in sentences), named, rng)
    return rng.choice(_SYSTEM), text, found


def _feeling(rng: random.Random) -> Question:
    label = rng.choice(list(_FEELINGS["labels"]))
    pattern = rng.choice(_FEELINGS["labels"][label])
    text = pattern.format(**{place: spoken(DRAWS[place](rng)) for place in _places(pattern)})
    key = rng.choice(_FEELINGS["keys"])
    return rng.choice(_SYSTEM), rng.choice(_FEELING_REQUESTS).format(text=text, key=key), {key: label}


def _sentence(record: dict[str, Any], rng: random.Random, pattern: str = "") -> tuple[str, dict[str, Value]]:
    """Returns a sentence, and its values by the names of the record's fields in the sentence's order."""
    pattern = pattern or rng.choice(record["patterns"])
    values = {place: DRAWS[record["fields"][place]["kind"]](rng) for place in _places(pattern)}
    return pattern.format(**{place: spoken(value) for place, value in values.items()}), values


def _request(record: dict[str, Any], text: str, keys: list[str], rng: random.Random) -> str:
    """Returns the question; without `keys` it does not say what the object is to have."""
    if keys:
        return rng.choice(_REQUESTS_WITH_KEYS).format(text=text, keys=_listed(keys))
    return rng.choice(_REQUESTS).format(text=text, noun=rng.choice(record["nouns"]))


def _nested(found: dict[str, Any], record: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Returns the object as it is, or below a key that names it."""
    return {rng.choice(record["nouns"]).replace(" ", "_"): found} if rng.random() < 0.08 else found


def _key(record: dict[str, Any], name: str, rng: random.Random) -> str:
    key: str = rng.choice(record["fields"][name]["keys"])
    return key


def _listed(keys: list[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"


def _places(pattern: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(pattern) if name]


def written(found: dict[str, Any]) -> str:
    """Returns the answer as the model is to write it."""
    return json.dumps(found, ensure_ascii=False)
