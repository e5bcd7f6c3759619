"""The questions: templates that are trained and templates that are held out; knows nothing of answers or tokens.

`{x}` is the asked name in one of the forms of `name_forms`; `{d}` a first sentence without its full stop.
Every question is one of five kinds, and the kind alone decides the shape of the answer (`conversations.answer`).
"""

import random

TRAINED: dict[str, tuple[str, ...]] = {
    "describe": (
        "What does {x} do?",
        "What is {x}?",
        "What is {x} for?",
        "What's {x}?",
        "What does {x} do in Python?",
        "Describe {x}.",
        "Describe {x} in one sentence.",
        "Tell me what {x} does.",
        "Can you tell me what {x} does?",
        "What is the purpose of {x}?",
        "What is {x} used for?",
        "I found {x} in some code. What does it do?",
        "In Python, what does {x} do?",
        "Summarise {x}.",
        "{x}: what does it do?",
        "What does the documentation say about {x}?",
        "Could you say what {x} is?",
        "I need to know what {x} does.",
        "Quick question: what does {x} do?",
        "{x}?",
        "Do you know what {x} does?",
        "Give me a short description of {x}.",
        "What happens when I use {x}?",
        "Remind me what {x} does.",
        "We use {x} at work. What does it do?",
        "A friend told me about {x}. What does it do?",
        "My code calls {x}. What does that do?",
        "There is {x} in this program. What is it?",
        "I have never seen {x}. What does it do?",
        "Someone wrote {x} here. What does that mean?",
    ),
    "explain": (
        "Explain {x}.",
        "Explain {x} to me.",
        "Can you explain {x}?",
        "Please explain what {x} does.",
        "Tell me about {x}.",
        "Tell me more about {x}.",
        "Explain in detail what {x} does.",
        "Give me an explanation of {x}.",
        "I do not understand {x}. Can you explain it?",
        "What should I know about {x}?",
    ),
    "usage": (
        "How do I use {x}?",
        "How can I use {x}?",
        "How is {x} used?",
        "How do I call {x}?",
        "Show me how to use {x}.",
        "How does one use {x}?",
        "I want to use {x}. How?",
    ),
    "signature": (
        "What is the signature of {x}?",
        "Signature of {x}?",
        "Show me the signature of {x}.",
        "What arguments does {x} take?",
        "Which parameters does {x} have?",
        "What are the parameters of {x}?",
    ),
    "reverse": (
        'What in the standard library fits this: "{d}"?',
        'Which name has this description: "{d}"?',
        'I am looking for this: "{d}". What is it called?',
        'Find this in the standard library: "{d}"',
        'What should I use for this: "{d}"?',
    ),
}

HELD_OUT: dict[str, tuple[str, ...]] = {
    "describe": (
        "What exactly does {x} do?",
        "Say what {x} does.",
        "Hello! What does {x} do?",
        "So what is {x}?",
        "I wonder what {x} does.",
        "What can {x} do?",
        "Could you tell me what {x} is for?",
        "What does Python document about {x}?",
        "My colleague uses {x}. What does it do?",
    ),
    "explain": ("Could you explain {x}?", "I would like an explanation of {x}.", "Explain what {x} is."),
    "usage": ("How should I use {x}?", "Can you show me how to use {x}?"),
    "signature": ("What does the signature of {x} look like?", "Tell me the signature of {x}."),
}

_PREFIXES = ("Please: ", "Hi, ", "Hello, ", "Hey, ", "Excuse me, ", "A question: ")
_KIND_WORDS = {
    "module": "module",
    "class": "class",
    "exception": "exception",
    "function": "function",
    "method": "method",
    "attribute": "attribute",
}


def name_forms(name: str, kind: str) -> list[str]:
    """The ways in which a question writes a name."""
    word = _KIND_WORDS[kind]
    forms = [
        name,
        name,
        f"`{name}`",
        f"Python's {name}",
        f"the {word} {name}",
        f"the {name} {word}",
        f"Python's `{name}`",
    ]
    if kind in ("function", "method"):
        forms += [f"{name}()", f"`{name}()`", f"Python's {name}()"]
    return forms


def question(template: str, name: str, kind: str, description: str, rng: random.Random) -> str:
    """One question from a template, with the carelessness of people: lower-case starts, missing marks, greetings."""
    text = template.format(x=rng.choice(name_forms(name, kind)), d=description.rstrip("."))
    if text[0].islower() and rng.random() < 0.8:
        text = text[0].upper() + text[1:] if text.startswith("the ") else text
    starts_with_name = template.startswith("{x}")
    if rng.random() < 0.15 and not starts_with_name:
        text = text[0].lower() + text[1:] if not text.startswith("I ") else text
    if rng.random() < 0.06:
        text = rng.choice(_PREFIXES) + (
            text if starts_with_name or text.startswith("I ") else text[0].lower() + text[1:]
        )
    if rng.random() < 0.15 and text[-1] in "?.":
        text = text[:-1]
    return text
