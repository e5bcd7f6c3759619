"""Writes the committed snapshot of the standard library: what is documented, and the sources read as plain code.

Knows Python objects and docstrings; knows nothing of questions, tokens or training.
Run it with Python 3.11 (`python -m demo.snapshot`); the result is committed, so training never depends on the machine.
"""

import argparse
import importlib
import inspect
import json
import lzma
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from demo.entries import DATA, DOCSTRINGS_FILE, SOURCES_FILE, Entry

# ruff: noqa: SIM905 - a wrapped list of a hundred words reads better than a hundred quoted lines
# The best-known modules first: an object that several modules show is kept under the first of its names.
MODULES = """
builtins os os.path re json math random statistics itertools functools collections collections.abc string textwrap
datetime time calendar pathlib shutil glob fnmatch tempfile io csv configparser argparse logging logging.handlers
logging.config subprocess threading multiprocessing queue asyncio concurrent.futures contextlib dataclasses enum
typing types abc copy pprint operator heapq bisect array weakref decimal fractions cmath numbers hashlib hmac secrets
uuid base64 binascii struct codecs unicodedata pickle shelve sqlite3 zlib gzip bz2 lzma zipfile tarfile sys platform
signal select selectors socket ssl socketserver http http.client http.server http.cookies http.cookiejar urllib.parse
urllib.request urllib.error urllib.robotparser html html.parser xml.etree.ElementTree xml.dom.minidom xml.sax email
email.message email.policy email.utils email.mime.text email.mime.multipart smtplib ftplib mimetypes ipaddress inspect
ast dis traceback warnings gc importlib importlib.util importlib.machinery importlib.resources importlib.metadata
pkgutil runpy tokenize keyword token timeit cProfile profile pstats tracemalloc trace unittest unittest.mock doctest
difflib filecmp fileinput linecache stat errno getpass getopt locale gettext cmd shlex sched graphlib contextvars
zoneinfo reprlib colorsys wave webbrowser xmlrpc.client atexit faulthandler mmap resource pwd grp fcntl optparse
plistlib netrc zipapp zipimport venv ctypes compileall py_compile codeop code copyreg sysconfig site tomllib struct
""".split()

MAX_SOURCE_CHARACTERS = 250_000
SKIPPED_FOLDERS = frozenset(
    "test tests idlelib idle_test lib2to3 ensurepip site-packages turtledemo encodings pydoc_data __phello__".split()
)
_SIGNATURE_LINE = re.compile(r"^[\w.\[\]]+\(.*\)(\s*(->|→|--)\s*(?P<result>.*))?$")
_WIDE_STOP = re.compile(r"(?<=[.!?]) {2,}(?=\S)")  # two spaces end a sentence whatever follows
_MARK = "\ue000"
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*(?:\s+(?=[A-Z\"'`(*]|\w+\()|\ue000)")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|resp|approx|No|Dr)\.$")


def main() -> None:
    """Writes both files of the snapshot and prints their sizes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=DATA)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    entries = list(documented_entries())
    _write_jsonl(out / DOCSTRINGS_FILE, [entry.to_dict() for entry in entries])
    sources = list(module_sources())
    _write_jsonl(out / SOURCES_FILE, sources)
    (out / "ORIGIN.json").write_text(
        json.dumps({"python": platform.python_version(), "licence": "PSF-2.0", "entries": len(entries)}, indent=1)
        + "\n"
    )
    for name in (DOCSTRINGS_FILE, SOURCES_FILE):
        print(name, (out / name).stat().st_size, "bytes")
    print(len(entries), "entries;", len(sources), "sources;", sum(len(s["text"]) for s in sources), "characters")


def documented_entries() -> Iterator[Entry]:
    """Every public documented object of MODULES, each object and each name once."""
    seen_objects: set[int] = set()
    seen_names: set[str] = set()
    seen_descriptions: dict[str, int] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        candidates = [(module_name, "module", module), *_members(module_name, module)]
        for name, kind, value in candidates:
            if name in seen_names or id(value) in seen_objects:
                continue
            entry = _entry(name, kind, value)
            if entry is None:
                continue
            # One sentence that stands under many names ("Not implemented.") says nothing about any of them.
            if seen_descriptions.get(entry.first_sentence, 0) >= 6:
                continue
            seen_descriptions[entry.first_sentence] = seen_descriptions.get(entry.first_sentence, 0) + 1
            seen_names.add(name)
            seen_objects.add(id(value))
            yield entry


def _members(module_name: str, module: ModuleType) -> Iterator[tuple[str, str, Any]]:
    names = getattr(module, "__all__", None) or sorted(vars(module))
    prefix = "" if module_name == "builtins" else module_name + "."
    for name in sorted(set(names)):
        value = getattr(module, name, None)
        if name.startswith("_") or value is None or inspect.ismodule(value):
            continue
        if not hasattr(module, "__all__") and not _belongs(value, module_name):
            continue
        if inspect.isclass(value):
            yield prefix + name, "exception" if issubclass(value, BaseException) else "class", value
            for attribute, member in sorted(vars(value).items()):
                if attribute.startswith("_"):
                    continue
                if isinstance(member, property) or inspect.isgetsetdescriptor(member):
                    yield f"{prefix}{name}.{attribute}", "attribute", member
                elif inspect.isroutine(member) or isinstance(member, (classmethod, staticmethod)):
                    yield f"{prefix}{name}.{attribute}", "method", getattr(value, attribute)
        elif inspect.isroutine(value):
            yield prefix + name, "function", value


def _belongs(value: Any, module_name: str) -> bool:
    """True if an object without `__all__` to vouch for it was defined in the module or its C half."""
    if module_name == "builtins":
        return True
    home = getattr(value, "__module__", None) or ""
    return home.lstrip("_") in (module_name, module_name.split(".")[-1]) or (module_name == "os" and home == "posix")


def _entry(name: str, kind: str, value: Any) -> Entry | None:
    docstring = inspect.getdoc(value) if kind != "module" else inspect.cleandoc(value.__doc__ or "")
    if not docstring or not docstring.isascii() or "Alias for field number" in docstring:
        return None
    signature, body = _split_signature(name, kind, value, docstring)
    first = first_sentence(body)
    if first is None or (kind == "class" and first.startswith(name.split(".")[-1] + "(")):
        return None
    return Entry(name=name, kind=kind, signature=signature, first_sentence=first, docstring=body[:4000])


def _split_signature(name: str, kind: str, value: Any, docstring: str) -> tuple[str, str]:
    """The signature to show ("" if none is known) and the docstring without its signature lines."""
    lines = docstring.splitlines()
    shown = ""
    while lines and (match := _SIGNATURE_LINE.match(lines[0].strip())):
        result = match["result"] or ""
        if len(result.split()) > 4 or not any(line.strip() for line in lines[1:]):
            break
        shown = shown or lines[0].strip()
        lines.pop(0)
    body = "\n".join(lines).strip() or docstring
    if kind in ("module", "attribute"):
        return "", body
    try:
        parameters = str(inspect.signature(value))
    except (ValueError, TypeError, AttributeError):
        return (shown if len(shown) <= 160 else ""), body
    signature = name + parameters
    if len(signature) > 200 or " at 0x" in signature or "<" in signature:
        signature = ""
    return signature, body


def first_sentence(text: str) -> str | None:
    """The first sentence of a docstring on one line, or None if it is too short, too long or no prose."""
    found = sentences(text.strip().split("\n\n")[0])
    sentence = found[0] if found else ""
    if not 12 <= len(sentence) <= 200 or " " not in sentence or sentence.endswith(":"):
        return None
    if sentence.startswith((">>>", "-", "=", "|", "*", "$", "#", "#!")) or "::" in sentence or " - - " in sentence:
        return None
    return sentence


def sentences(paragraph: str) -> list[str]:
    """A paragraph cut after full stops that are followed by a new sentence, each sentence on one line."""
    paragraph = " ".join(_WIDE_STOP.sub(_MARK, paragraph).split())
    found: list[str] = []
    start = 0
    for match in _SENTENCE_END.finditer(paragraph):
        if not _ABBREVIATION.search(paragraph[start : match.start()]):
            found.append(_plain(paragraph[start : match.end()]))
            start = match.end()
    rest = _plain(paragraph[start:])
    return [*found, rest] if rest else found


def _plain(text: str) -> str:
    return text.replace(_MARK, " ").strip()


def module_sources() -> Iterator[dict[str, str]]:
    """The library's Python sources as `{"module", "text"}`, without tests, tables and bundled tools."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts) or parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        if 200 <= len(text) <= MAX_SOURCE_CHARACTERS:
            yield {"module": ".".join(parts).removesuffix(".__init__"), "text": text}


def _write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
