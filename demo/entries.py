"""Reads the committed snapshot: an `Entry` for each documented object, and the sources; knows no introspection."""

import json
import lzma
from dataclasses import asdict, dataclass
from pathlib import Path

DATA = Path(__file__).parent / "data"
DOCSTRINGS_FILE = "docstrings.jsonl.xz"
SOURCES_FILE = "sources.jsonl.xz"


@dataclass(frozen=True, slots=True)
class Entry:
    """A documented object; `signature` is empty where none is known, `docstring` is without signature lines."""

    name: str
    kind: str  # module, class, exception, function, method, attribute
    signature: str
    first_sentence: str
    docstring: str

    def to_dict(self) -> dict[str, str]:
        """The entry as one row of the snapshot."""
        return asdict(self)


def load_entries(path: Path = DATA / DOCSTRINGS_FILE) -> list[Entry]:
    """All entries in the snapshot's order."""
    return [Entry(**row) for row in _rows(path)]


def load_sources(path: Path = DATA / SOURCES_FILE) -> list[tuple[str, str]]:
    """All sources as (module name, text)."""
    return [(row["module"], row["text"]) for row in _rows(path)]


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; run `python -m demo.snapshot` with Python 3.11")
    return [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().splitlines()]
