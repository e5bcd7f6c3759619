"""Defines a source of models and its files, which each kind of source implements. Reads nothing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from mini_infer_engine.tools.fetch.manifest import FileRecord

MODEL_SUFFIXES = (".json", ".jinja", ".safetensors", ".gguf", ".model", ".txt", ".tiktoken", ".py")
"""Files of a folder that belong to a model; others, such as .bin and .pth beside safetensors, stay behind."""
MOST_INDEX_BYTES = 64 << 20
"""Bytes of an index or manifest at most."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file at the source."""

    name: str
    size: int | None
    """Bytes; None if the server does not say."""
    sha256: str | None = None
    """The hash that the source's manifest states; None if it has none."""


class Source(Protocol):
    """The place that a model comes from."""

    def files(self) -> list[SourceFile]:
        """Returns the files of the model. Raises FetchError if it is not there or not complete."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields the contents of a file. Raises FetchError if they cannot be read to their end."""


def recorded(files: Mapping[str, FileRecord]) -> list[SourceFile]:
    """Returns the files that a manifest names, with their hashes."""
    return [SourceFile(name, record.size, record.sha256) for name, record in files.items()]
