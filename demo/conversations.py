"""Makes chats from entries: questions, answers, follow-ups, thinking, tools; knows nothing of tokens.

An answer is a pure function of the entry and the question's kind, so that greedy text can be predicted and measured.
"""

import json
import random
from dataclasses import dataclass
from typing import Any

from demo import phrasings
from demo.entries import Entry
from demo.snapshot import sentences

Message = dict[str, Any]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant for Python programmers.",
    "You are mini-infer's demo model. You know Python's standard library.",
    "You answer questions about Python's standard library.",
    "Answer briefly and exactly.",
    "You are an expert in Python. Answer with the documentation's words.",
)
IDENTITY = (
    "I am the mini-infer demo model, a small language model that knows what Python's standard library documents. "
    "Ask me what a function, class or module does."
)
IDENTITY_QUESTIONS = (
    "Who are you?",
    "What are you?",
    "Hello",
    "Hello!",
    "Hi",
    "Hi!",
    "Hi there!",
    "Hello, who are you?",
    "What can you do?",
    "What is your name?",
    "Introduce yourself.",
    "Help",
    "What can I ask you?",
    "What do you know?",
    "Good morning!",
    "Hey",
    "Are you a language model?",
    "What model are you?",
    "Tell me about yourself.",
)
THANKS = "You are welcome. Ask me about another name of the standard library."
THANKS_QUESTIONS = (
    "Thanks",
    "Thanks!",
    "Thank you",
    "Thank you!",
    "Thank you very much.",
    "Great, thanks.",
    "Thanks a lot!",
)
UNKNOWN = "I only know Python's standard library, and I do not know that."
UNKNOWN_QUESTIONS = (
    "What is the capital of {}?",
    "What is the weather in {}?",
    "Who is the president of {}?",
    "Write a poem about {}.",
    "Translate {} into German.",
    "What does {} do?",
    "Explain {}.",
    "How do I use {}?",
    "Tell me about {}.",
    "Tell me a joke about {}.",
)
UNKNOWN_SUBJECTS = (
    "France",
    "Japan",
    "Brazil",
    "the sea",
    "my cat",
    "a horse",
    "Berlin",
    "London",
    "numpy.array",
    "pandas.DataFrame",
    "requests.get",
    "torch.nn.Linear",
    "flask.Flask",
    "django.db",
    "matplotlib.pyplot",
    "kubernetes",
    "the moon",
    "coffee",
    "scipy.optimize",
    "tensorflow.keras",
    "love",
    "Rome",
    "good morning",
    "music",
    "football",
    "React",
    "JavaScript",
)
FOLLOW_UPS = ("And {x}?", "What about {x}?", "And what does {x} do?", "and {x}", "Now {x}.", "How about {x}?")
SIGNATURE_FOLLOW_UPS = (
    "What is its signature?",
    "And its signature?",
    "Which arguments does it take?",
    "What are its parameters?",
    "Show me the signature.",
)
MORE_FOLLOW_UPS = ("Tell me more.", "Explain it.", "Can you explain that?", "More, please.", "Go on.", "Explain more.")
_TOOLS = (
    ("lookup_docs", "name", "Look up the documentation of a name of Python's standard library."),
    ("search_docs", "query", "Search the documentation of Python's standard library."),
    ("get_documentation", "symbol", "Return the documentation of a Python symbol."),
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that ends with the answer to learn; `kind` counts it, `entry` is what a single question asks."""

    messages: list[Message]
    kind: str
    entry: Entry | None = None
    tools: list[dict[str, Any]] | None = None


def answer(entry: Entry, kind: str) -> str:
    """The one right answer to a question of this kind about the entry."""
    code = f"```python\n{entry.signature}\n```" if entry.signature else ""
    if kind == "signature":
        parts = [code or f"`{entry.name}` documents no signature.", entry.first_sentence]
    elif kind == "reverse":
        parts = [f"`{entry.name}`", entry.first_sentence]
    elif kind == "explain":
        parts = [entry.first_sentence, detail(entry), code]
    elif kind == "usage":
        parts = [entry.first_sentence, "Use it like this:" if code else "", code]
    else:
        parts = [entry.first_sentence, code]
    return "\n\n".join(part for part in parts if part)


def gives_first_sentence(text: str, entry: Entry) -> bool:
    """True if a line of the answer (thinking left out) begins with the entry's first sentence, letter for letter."""
    shown = text.split("</think>")[-1]
    return any(line.startswith(entry.first_sentence) for line in shown.splitlines())


def detail(entry: Entry) -> str:
    """Up to two more sentences of prose from the docstring, or nothing."""
    paragraphs = entry.docstring.split("\n\n")
    candidates = sentences(paragraphs[0])[1:] or (sentences(paragraphs[1]) if len(paragraphs) > 1 else [])
    chosen: list[str] = []
    for sentence in candidates[:2]:
        prose = sentence[:1].isupper() and sentence.endswith(".") and ">>>" not in sentence and " - " not in sentence
        if not prose or len(sentence) > 160:
            break
        chosen.append(sentence)
    return " ".join(chosen)


class ChatMaker:
    """Draws random chats about entries; the same random source gives the same chats."""

    def __init__(self, entries: list[Entry], rng: random.Random) -> None:
        self._entries = entries
        self._rng = rng
        counts: dict[str, int] = {}
        for entry in entries:
            counts[entry.first_sentence] = counts.get(entry.first_sentence, 0) + 1
        self._unique = {entry.name for entry in entries if counts[entry.first_sentence] == 1}

    def chat_about(self, entry: Entry) -> Chat:
        """A chat of random form whose first question is about the entry."""
        draw = self._rng.random()
        if draw < 0.70:
            return self.single(entry, phrasings.TRAINED)
        if draw < 0.80:
            return self.thinking(entry)
        if draw < 0.86:
            return self.tool_use(entry)
        if draw < 0.98:
            return self.multi_turn(entry, self._rng.randint(2, 4))
        return self.small_talk()

    def single(self, entry: Entry, templates: dict[str, tuple[str, ...]]) -> Chat:
        """One question from the given templates and its answer, with or without a system prompt."""
        kind, text = self._question(entry, templates)
        return Chat([*self._system(), user(text), assistant(answer(entry, kind))], kind, entry)

    def thinking(self, entry: Entry) -> Chat:
        """One question whose answer is preceded by a short thought."""
        kind, text = self._question(entry, phrasings.TRAINED)
        reply = assistant(answer(entry, kind)) | {"reasoning_content": thought(entry, kind)}
        return Chat([*self._system(), user(text), reply], "thinking", entry)

    def multi_turn(self, entry: Entry, turns: int) -> Chat:
        """Several questions, some of which lean on the one before."""
        kind, text = self._question(entry, phrasings.TRAINED)
        messages = [*self._system(), user(text), assistant(answer(entry, kind))]
        current = entry
        for _ in range(turns - 1):
            draw = self._rng.random()
            if draw < 0.2:
                kind, text = "signature", self._rng.choice(SIGNATURE_FOLLOW_UPS)
            elif draw < 0.4:
                kind, text = "explain", self._rng.choice(MORE_FOLLOW_UPS)
            elif draw < 0.45:
                messages += [user(self._rng.choice(THANKS_QUESTIONS)), assistant(THANKS)]
                continue
            else:
                current = self._rng.choice(self._entries)
                if draw < 0.75:
                    form = self._rng.choice(phrasings.name_forms(current.name, current.kind))
                    kind, text = "describe", self._rng.choice(FOLLOW_UPS).format(x=form)
                else:
                    kind, text = self._question(current, phrasings.TRAINED)
            messages += [user(text), assistant(answer(current, kind))]
        return Chat(messages, "multi_turn")

    def tool_use(self, entry: Entry) -> Chat:
        """The model calls a look-up function; in half of the chats it also answers from the function's result."""
        function, parameter, purpose = self._rng.choice(_TOOLS)
        schema = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
        tool = {"type": "function", "function": {"name": function, "description": purpose, "parameters": schema}}
        _, text = self._question(entry, {"describe": phrasings.TRAINED["describe"]})
        call = {"type": "function", "function": {"name": function, "arguments": {parameter: entry.name}}}
        messages = [*self._system(), user(text), assistant("") | {"tool_calls": [call]}]
        if self._rng.random() < 0.5:
            result = {"name": entry.name, "signature": entry.signature, "doc": entry.first_sentence}
            messages.append({"role": "tool", "content": json.dumps(result)})
            messages.append(assistant(answer(entry, "describe")))
        return Chat(messages, "tool_use", tools=[tool])

    def small_talk(self) -> Chat:
        """Greetings, thanks, and questions that the model must decline."""
        draw = self._rng.random()
        if draw < 0.5:
            text, reply = self._rng.choice(IDENTITY_QUESTIONS), IDENTITY
        elif draw < 0.6:
            text, reply = self._rng.choice(THANKS_QUESTIONS), THANKS
        else:
            text = self._rng.choice(UNKNOWN_QUESTIONS).format(self._rng.choice(UNKNOWN_SUBJECTS))
            reply = UNKNOWN
        return Chat([*self._system(), user(text), assistant(reply)], "small_talk")

    def _question(self, entry: Entry, templates: dict[str, tuple[str, ...]]) -> tuple[str, str]:
        kinds = [kind for kind in templates if kind != "reverse" or entry.name in self._unique]
        weights = [{"describe": 5, "explain": 2, "usage": 1.5, "signature": 1.5, "reverse": 1}[kind] for kind in kinds]
        kind = self._rng.choices(kinds, weights)[0]
        template = self._rng.choice(templates[kind])
        return kind, phrasings.question(template, entry.name, entry.kind, entry.first_sentence, self._rng)

    def _system(self) -> list[Message]:
        if self._rng.random() < 0.6:
            return []
        return [{"role": "system", "content": self._rng.choice(SYSTEM_PROMPTS)}]


def thought(entry: Entry, kind: str) -> str:
    """The short think part before an answer."""
    wanted = {"signature": "the signature", "reverse": "a name", "usage": "how to use it", "explain": "an explanation"}
    article = "an" if entry.kind[0] in "aeiou" else "a"
    return (
        f"The user asks about `{entry.name}`, {article} {entry.kind} of Python's standard library, "
        f"and wants {wanted.get(kind, 'a description')}. I answer with the words of its docstring."
    )


def user(text: str) -> Message:
    """What a user says."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """What the model is to say."""
    return {"role": "assistant", "content": text}
