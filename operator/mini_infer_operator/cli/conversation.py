"""Keeps what `mini-infer chat` remembers: messages, and settings for answers. Pure: lines in, bodies out."""

from dataclasses import dataclass, field
from typing import Any

from mini_infer_process.command_line import number_within

HELP = """\
/system TEXT      the system prompt; without TEXT: nothing
/temperature N    0: always the likeliest; without N: the server's own
/thinking on|off  think before the answer, where the model can; without a word: as the model does
/reset            forget the conversation; the settings stay
/help             this
/quit             end, as Ctrl-D does; Ctrl-C stops an answer
Anything else is a message; // at its beginning is sent as /."""
GREETING = "Type a message. /help shows the commands, /quit (or Ctrl-D) ends."
END_WORDS = frozenset(("/quit", "/exit"))

Message = dict[str, str]


class CommandError(Exception):
    """Raised if a command cannot be carried out; the message says why."""


@dataclass(slots=True)
class Conversation:
    """A conversation, with its settings."""

    model: str
    system: str = ""
    temperature: float | None = None
    """The sampling temperature, or None for the server's default."""
    thinking: bool | None = None
    """True to think before an answer; None for the model's default."""
    messages: list[Message] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """Returns the body of the request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"model": self.model, "messages": [*system, *self.messages], "stream": True}
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.thinking is not None:
            body["reasoning_effort"] = "medium" if self.thinking else "none"
        return body

    def send(self, text: str) -> None:
        """Adds the user's next message."""
        self.messages.append({"role": "user", "content": text.removeprefix("/") if text.startswith("//") else text})

    def answered(self, text: str) -> None:
        """Adds the model's answer, as far as it came."""
        self.messages.append({"role": "assistant", "content": text})

    def command(self, line: str) -> str | None:
        """Carries out a command and returns a line that says so. Returns None if `line` is a message. Raises
        CommandError.
        """
        if not line.startswith("/") or line.startswith("//"):
            return None
        name, _, value = line.partition(" ")
        value = value.strip()
        if name == "/help":
            return HELP
        if name == "/reset":
            self.messages = []
            return "(forgotten)"
        if name == "/system":
            self.system = value
            return f"(system prompt: {value or 'none'})"
        if name == "/temperature":
            self.temperature = _temperature(value) if value else None
            return f"(temperature: {value or 'as the server has it'})"
        if name == "/thinking":
            self.thinking = _on_or_off(value) if value else None
            return f"(thinking: {value or 'as the model does'})"
        raise CommandError(f"there is no {name}: /help shows the commands, // sends what begins with /")


def _temperature(value: str) -> float:
    if (number := number_within(value, 0, 2)) is None:
        raise CommandError(f"{value} is no temperature: write a number from 0 to 2")
    return number


def _on_or_off(value: str) -> bool:
    if value not in {"on", "off"}:
        raise CommandError(f"{value} is neither on nor off")
    return value == "on"
