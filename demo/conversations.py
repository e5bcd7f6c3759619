"""Makes chats from entries: questions, answers, follow-ups, thinking, tools; knows nothing of tokens.

An answer is a pure function of the entry and the question's kind, so that greedy text can be predicted and measured.
"""

import json
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import yaml

from demo import phrasings
from demo.entries import DATA, Entry
from demo.out_of_scope import OutOfScope, suffixes
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
UNKNOWN = (
    "I only know Python's standard library, and I do not know that. "
    + "Ask me about a name in it, such as `textwrap.dedent`."
)
_TASK_QUESTIONS = (
    "How do I {}?",
    "How do I {} in Python?",
    "How can I {}?",
    "How can I {} in Python?",
    "How to {}?",
    "How to {} in Python?",
    "Which function do I use to {}?",
    "What should I use to {}?",
    "I want to {}. What do I use?",
    "In Python, how do I {}?",
    "What is the way to {} in Python?",
    "Show me how to {}.",
)
HELD_OUT_TASK_QUESTIONS = ("What can I use to {}?", "How does one {} in Python?", "I need to {}.")
TASKS: dict[str, list[str]] = yaml.safe_load((DATA / "tasks.yaml").read_text(encoding="utf-8"))
"""Common tasks, by the full name of what does them."""
_LISTED_NAMES = 3
"""So many full names are offered where a short one is of several entries."""
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
    ("lookup_docs", "name", "Look up what a Python function does."),
    ("search_docs", "query", "Search the documentation of Python's standard library."),
    ("search_docs", "q", "Search Python's documentation"),
    ("get_documentation", "symbol", "Return the documentation of a Python symbol."),
    ("python_help", "name", "Help on a Python name."),
    ("docs", "function", "The documentation of a Python function"),
)
_LOOK_UPS = (
    "Look up {}.",
    "Look up the documentation of {}.",
    "Search the documentation for {}.",
    "Find the documentation of {}, please.",
    "Look up what {} does.",
    "Can you look up {}?",
    "Use the tool to find out what {} does.",
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


def by_suffix(entries: list[Entry]) -> dict[str, list[str]]:
    """Returns the full names that end in each short name, the shortest first."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted((entry.name for entry in entries), key=lambda name: (len(name), name)):
        for suffix in suffixes(name):
            found[suffix].append(name)
    return dict(found)


def several(short: str, names: list[str]) -> str:
    """Returns the answer to a question about a short name that several entries have."""
    listed = ", ".join(f"`{name}`" for name in names[:_LISTED_NAMES])
    return f"Several names end in `{short}`: {listed}. Ask with the full name."


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
        self._names = {entry.name: entry for entry in entries}
        self._by_suffix = by_suffix(entries)
        self._tasks = [name for name in TASKS if name in self._names]
        self._out_of_scope = OutOfScope(entries, rng)

    def chat_about(self, entry: Entry) -> Chat:
        """A chat of random form whose first question is about the entry."""
        draw = self._rng.random()
        if draw < 0.52:
            return self.single(entry, phrasings.TRAINED)
        if draw < 0.64:
            return self.short_name(entry, phrasings.TRAINED)
        if draw < 0.68 and self._tasks:
            return self.task(_TASK_QUESTIONS)
        if draw < 0.75:
            return self.thinking(entry)
        if draw < 0.83:
            return self.tool_use(entry)
        if draw < 0.93:
            return self.multi_turn(entry, self._rng.randint(2, 4))
        return self.small_talk()

    def single(self, entry: Entry, templates: dict[str, tuple[str, ...]]) -> Chat:
        """One question from the given templates and its answer, with or without a system prompt."""
        kind, text = self._question(entry, templates)
        return Chat([*self._system(), user(text), assistant(answer(entry, kind))], kind, entry)

    def short_name(self, entry: Entry, templates: dict[str, tuple[str, ...]]) -> Chat:
        """A question that names the entry without its module: answered if only one has that name, else with a list."""
        short = [suffix for suffix in suffixes(entry.name) if suffix not in self._names]
        if not short:
            return self.single(entry, templates)
        suffix = self._rng.choice(short)
        kinds = {kind: forms for kind, forms in templates.items() if kind != "reverse"}
        kind, template = self._drawn(kinds)
        text = phrasings.question(template, suffix, entry.kind, entry.first_sentence, self._rng)
        named = self._by_suffix[suffix]
        reply = answer(entry, kind) if len(named) == 1 else several(suffix, named)
        return Chat([*self._system(), user(text), assistant(reply)], "short_name" if len(named) == 1 else "several")

    def task(self, templates: tuple[str, ...]) -> Chat:
        """A common task, answered with the name that does it."""
        name = self._rng.choice(self._tasks)
        text = self._rng.choice(templates).format(self._rng.choice(TASKS[name]))
        reply = answer(self._names[name], "reverse")
        return Chat([*self._system(), user(text), assistant(reply)], "task")

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
        if self._rng.random() < 0.35:
            text = self._rng.choice(_LOOK_UPS).format(self._rng.choice(phrasings.name_forms(entry.name, entry.kind)))
        else:
            _, text = self._question(entry, {"describe": phrasings.TRAINED["describe"]})
        call = {"type": "function", "function": {"name": function, "arguments": {parameter: entry.name}}}
        messages = [*self._system(), user(text), assistant("") | {"tool_calls": [call]}]
        if self._rng.random() < 0.5:
            as_found = self._as_found(entry)
            result = {"name": entry.name, "signature": as_found.signature, "doc": as_found.first_sentence}
            messages.append({"role": "tool", "content": json.dumps(result)})
            messages.append(assistant(answer(as_found, "describe")))
        return Chat(messages, "tool_use", tools=[tool])

    def _as_found(self, entry: Entry) -> Entry:
        """Returns the entry with what a look-up says of it, which half of the time is not what was learned by heart."""
        if self._rng.random() < 0.5:
            return entry
        other = self._rng.choice(self._entries)
        words = other.first_sentence.split()
        sentence = (
            other.first_sentence if self._rng.random() < 0.5 else " ".join(words[: max(3, len(words) // 2)]) + "."
        )
        arguments = self._rng.choice(
            ("(text)", "(path, mode)", "(a, b=None)", "()", "(*args, **kwargs)", "(value)", "")
        )
        return replace(
            entry, signature=arguments and self._rng.choice(("", entry.name)) + arguments, first_sentence=sentence
        )

    def small_talk(self) -> Chat:
        """Greetings, thanks, and questions that the model must decline."""
        draw = self._rng.random()
        if draw < 0.15:
            text, reply = self._rng.choice(IDENTITY_QUESTIONS), IDENTITY
        elif draw < 0.2:
            text, reply = self._rng.choice(THANKS_QUESTIONS), THANKS
        else:
            return self.declined(self._out_of_scope)
        return Chat([*self._system(), user(text), assistant(reply)], "small_talk")

    def declined(self, questions: OutOfScope) -> Chat:
        """A question that the library does not answer, sometimes after one that it does."""
        before: list[Message] = []
        if self._rng.random() < 0.15:
            before = self.single(self._rng.choice(self._entries), phrasings.TRAINED).messages
        messages = before or self._system()
        return Chat([*messages, user(questions.question()), assistant(UNKNOWN)], "out_of_scope")

    def _question(self, entry: Entry, templates: dict[str, tuple[str, ...]]) -> tuple[str, str]:
        fitting = {kind: forms for kind, forms in templates.items() if kind != "reverse" or entry.name in self._unique}
        kind, template = self._drawn(fitting)
        return kind, phrasings.question(template, entry.name, entry.kind, entry.first_sentence, self._rng)

    def _drawn(self, templates: dict[str, tuple[str, ...]]) -> tuple[str, str]:
        """Returns a kind of question and one of its templates."""
        weights = {"describe": 5, "explain": 2, "usage": 1.5, "signature": 1.5, "reverse": 1}
        kind = self._rng.choices(list(templates), [weights[kind] for kind in templates])[0]
        return kind, self._rng.choice(templates[kind])

    def _system(self) -> list[Message]:
        if self._rng.random() < 0.6:
            return []
        return [{"role": "system", "content": self._rng.choice(SYSTEM_PROMPTS)}]


def thought(entry: Entry, kind: str) -> str:
    """The short think part before an answer."""
    descriptions = {
        "signature": "the signature",
        "reverse": "a name",
        "usage": "how to use it",
        "explain": "an explanation",
    }
    article = "an" if entry.kind[0] in "aeiou" else "a"
    return (
        f"The user asks about `{entry.name}`, {article} {entry.kind} of Python's standard library, "
        f"and wants {descriptions.get(kind, 'a description')}. I answer with the words of its docstring."
    )


def user(text: str) -> Message:
    """What a user says."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """What the model is to say."""
    return {"role": "assistant", "content": text}
