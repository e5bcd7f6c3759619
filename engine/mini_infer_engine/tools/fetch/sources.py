"""Lists and reads the files of a model at its source: a folder, or a web server. One class for each kind of source.

Buckets are in object_store.py.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from mini_infer_engine.tools.fetch.manifest import (
    MANIFEST_NAME,
    FetchError,
    checked_name,
    chunks_of,
    parse_manifest,
    read_manifest,
)
from mini_infer_engine.tools.fetch.object_store import ObjectStoreSource
from mini_infer_engine.tools.fetch.source_files import (
    MODEL_SUFFIXES,
    MOST_INDEX_BYTES,
    Source,
    SourceFile,
    recorded,
)

_TIMEOUT_S = 60.0
"""Seconds without a byte after which a server counts as gone."""
_CHUNK_BYTES = 8 << 20
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
)
"""Files for which a server without a manifest is asked; only config.json must be there."""


def source_of(uri: str) -> Source:
    """Returns the source that a URI names. Raises FetchError, with what to do, for those that cannot be read here."""
    scheme, separator, _ = uri.partition("://")
    scheme = scheme.lower() if separator else ""
    if scheme in ("http", "https"):
        _check_address(uri)
        return WebSource(uri)
    if scheme == "file" or not scheme:
        return FolderSource(Path(uri.removeprefix("file://")).expanduser())
    if scheme in ("s3", "gs"):
        return ObjectStoreSource(uri)
    remedies = {
        "hf": "engines download hf:// models themselves; to copy one, `hf download` it and name the folder",
        "oci": "write it in spec.model.uri: nodes pull and mount images themselves",
        "pvc": "mount the claim, and name its folder",
    }
    remedy = remedies.get(scheme, "name a folder, or an http://, https://, s3:// or gs:// address")
    raise FetchError(f"{uri}: {scheme}:// is not read by mini-infer fetch: {remedy}")


def _check_address(url: str) -> None:
    """Raises FetchError if files cannot be read below this address. Its message holds no password."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise FetchError(f"{url.rpartition('@')[2]}: {error}: write http(s)://host/path") from None
    if parts.username is not None:
        raise FetchError(
            f"{parts.scheme}://{host}: addresses with user:password@ are not read: serve the model without, or from a "
            "bucket (s3://, gs://), whose credentials come from the environment"
        )
    if not host:
        raise FetchError(f"{url}: it names no host: write http(s)://host/path")
    if parts.query or parts.fragment:
        raise FetchError(f"{url}: files are read below an address: leave out what begins with ? or #")


class FolderSource:
    """A folder of this machine, or a volume that is mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def files(self) -> list[SourceFile]:
        """Returns the files of the folder's manifest, or else those that belong to a model."""
        if not self._folder.is_dir():
            raise FetchError(f"{self._folder}: there is no such folder")
        if (manifest := read_manifest(self._folder)) is not None:
            return recorded(manifest.files)
        found = [
            SourceFile(checked_name(file.relative_to(self._folder).as_posix(), str(self._folder)), file.stat().st_size)
            for file in sorted(self._folder.rglob("*"))
            if file.is_file() and file.suffix in MODEL_SUFFIXES and not _is_hidden(file.relative_to(self._folder))
        ]
        if not any(file.name.endswith((".safetensors", ".gguf")) for file in found):
            raise FetchError(f"{self._folder} has no .safetensors and no .gguf file: name the folder of a model")
        return found

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields the contents of a file of the folder."""
        try:
            yield from chunks_of(self._folder / name)
        except OSError as error:
            raise FetchError(f"{self._folder / name}: {error.strerror or error}") from None


class WebSource:
    """A folder of a web server: `http(s)://host/path`, with the model's files below it."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def files(self) -> list[SourceFile]:
        """Returns the files of the server's manifest, or else config.json, the shards of the index, and what is there
        of tokenizer and templates.
        """
        if (text := self._text(MANIFEST_NAME)) is not None:
            return recorded(parse_manifest(text, f"{self._url}/{MANIFEST_NAME}").files)
        small = {name: size for name in _SMALL_FILES if (size := self._size(name)) is not None}
        if "config.json" not in small:
            raise FetchError(f"{self._url}/config.json is not there: name the address of a model's folder")
        weights = self._weights()
        return [SourceFile(name, _known(size)) for name, size in {**small, **weights}.items()]

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields the contents of a file of the server."""
        with self._opened("GET", name) as answer:
            if answer is None:
                raise FetchError(f"{self._url}/{name} is not there")
            expected = answer.headers.get("Content-Length")
            received = 0
            while chunk := answer.read(_CHUNK_BYTES):
                received += len(chunk)
                yield chunk
        if expected is not None and expected.isdecimal() and received != int(expected):
            raise FetchError(f"{self._url}/{name} broke off after {received:,} of {expected} bytes: run it again")

    def _weights(self) -> dict[str, int]:
        index = self._text(_INDEX)
        if index is None:
            size = self._size(_SINGLE)
            if size is None:
                raise FetchError(
                    f"{self._url} has neither {_SINGLE} nor {_INDEX}: put a {MANIFEST_NAME} beside other files "
                    "(`mini-infer fetch` writes one)"
                )
            return {_SINGLE: size}
        try:
            names = set(json.loads(index)["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FetchError(f"{self._url}/{_INDEX} is no index of safetensors: its weight_map is missing") from None
        checked = [checked_name(name, f"{self._url}/{_INDEX}") for name in names]
        sizes = {name: self._size(name) for name in sorted(checked)}
        missing = [name for name, size in sizes.items() if size is None]
        if missing:
            raise FetchError(f"{self._url} lacks {', '.join(missing[:3])}, which {_INDEX} names")
        return {_INDEX: len(index.encode()), **{name: size for name, size in sizes.items() if size is not None}}

    def _size(self, name: str) -> int | None:
        """Returns a file's bytes, -1 if the server does not say, None if it is not there."""
        with self._opened("HEAD", name) as answer:
            if answer is None:
                return None
            length = answer.headers.get("Content-Length", "")
            return int(length) if length.isdecimal() else -1

    def _text(self, name: str) -> str | None:
        with self._opened("GET", name) as answer:
            if answer is None:
                return None
            text = answer.read(MOST_INDEX_BYTES + 1)
        if len(text) > MOST_INDEX_BYTES:
            raise FetchError(f"{self._url}/{name} is larger than {MOST_INDEX_BYTES:,} bytes")
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError:
            raise FetchError(f"{self._url}/{name} is not UTF-8") from None

    @contextmanager
    def _opened(self, method: str, name: str) -> Iterator["_Answer | None"]:
        """Yields the server's answer; None for 404. Raises FetchError for other errors, also while it is read."""
        url = f"{self._url}/{quote(name)}"
        request = urllib.request.Request(url, method=method)  # `source_of` lets through http and https only
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            if error.code == 404:
                yield None
                return
            raise FetchError(f"{url}: the server answered {error.code} {error.reason}") from None
        except (OSError, HTTPException) as error:
            raise FetchError(f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}") from None


class _Answer(Protocol):
    headers: Any

    def read(self, count: int) -> bytes: ...


def _known(size: int) -> int | None:
    return None if size < 0 else size


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
