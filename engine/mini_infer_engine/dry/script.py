"""What a scripted dry run says: texts for given prompts, from a file. For tests of clients: only tokens are given.

Stateless: the reply follows from the prompt alone, so that it is the same on every engine behind a gateway, and after
a preemption. An agent's next step is told from the last by what its prompt holds by then, such as a tool's result.
"""

from pathlib import Path

import msgspec


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the script."""

    say: str
    """The text, as a model would write it: tool calls and thinking with their markers."""
    when: str = ""
    """Given only where the prompt holds this text; empty: always."""


Script = tuple[Reply, ...]


def read_script(path: Path) -> Script:
    """The replies of a JSON file. ValueError, OSError: it is no such file, and why."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Script)
    except msgspec.DecodeError as error:
        raise ValueError(f'{path} is no list of {{"when": TEXT, "say": TEXT}}: {error}') from None


def reply_for(prompt: str, script: Script) -> str | None:
    """What the first line says that fits; None where none does."""
    return next((reply.say for reply in script if reply.when in prompt), None)
