"""Reads the script of a dry run, which has texts for certain prompts. It is for tests of clients: only the tokens are
scripted.

The reply depends on the prompt alone, so that it is the same on every engine behind a gateway, and after a preemption.
Steps of an agent differ in what the prompt contains by then, such as a tool's result.
"""

from pathlib import Path

import msgspec


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the script."""

    say: str
    """The reply, as a model would write it: with the markers of tool calls and thinking."""
    when: str = ""
    """Text that the prompt must contain for this reply; empty if it fits every prompt."""


Script = tuple[Reply, ...]


def read_script(path: Path) -> Script:
    """Reads the replies from a JSON file. Raises ValueError with the reason if the format is wrong, and OSError if the
    file cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Script)
    except msgspec.DecodeError as error:
        raise ValueError(f'{path} is no list of {{"when": TEXT, "say": TEXT}}: {error}') from None


def reply_for(prompt: str, script: Script) -> str | None:
    """Returns the first reply that fits the prompt, or None if none does."""
    return next((reply.say for reply in script if reply.when in prompt), None)
