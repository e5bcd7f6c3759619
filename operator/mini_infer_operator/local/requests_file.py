"""Reads and writes `.mini-infer/NAME/requests.json`: what `mini-infer rollout` requests of a `mini-infer up`.

In a cluster the same stands in the InferenceService; here its file is the user's own, and no command edits it.
"""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

_NAME = "requests.json"


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of commands."""

    annotations: dict[str, str] = field(default_factory=dict)
    paused: bool | None = None
    """The value of `spec.rollout.paused`; None if the file's own counts."""


def read_requests(folder: Path) -> Requests:
    """Returns the requests in a service's folder; none if nothing was requested, or the file cannot be read."""
    try:
        return msgspec.json.decode((folder / _NAME).read_bytes(), type=Requests)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return Requests()


def write_requests(folder: Path, requests: Requests) -> None:
    """Writes the requests, so that readers see the old content or the new, never a part."""
    new = folder / f"{_NAME}.new"
    new.write_bytes(msgspec.json.encode(requests))
    new.replace(folder / _NAME)
