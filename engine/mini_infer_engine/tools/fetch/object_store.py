"""Reads the files of a model in a bucket: `s3://` and `gs://`, by obstore. Writes nothing.

Endpoint, region and credentials come from where the clouds' own programs have them: environment variables, a web
identity of the pod's ServiceAccount, and the machine's metadata service.
"""

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mini_infer_engine.tools.fetch.manifest import MANIFEST_NAME, FetchError, checked_name, parse_manifest
from mini_infer_engine.tools.fetch.source_files import MODEL_SUFFIXES, MOST_INDEX_BYTES, SourceFile, recorded
from mini_infer_process.extras import install_hint

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore

PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 8
"""Ranges of a file that are requested at once: one stream of a bucket gives a tenth of a fast network card."""
_MOST_OBJECTS = 100_000
_RETRIES = 4
_RETRY_S = 60.0
_BUCKET = re.compile(r"[a-z0-9][-a-z0-9._]{1,220}[a-z0-9]")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a ServiceAccount with a role, or AWS_SKIP_SIGNATURE=true for a "
    "public bucket",
    "gs": "GOOGLE_SERVICE_ACCOUNT_KEY or GOOGLE_APPLICATION_CREDENTIALS, a ServiceAccount with a Google identity, or "
    "GOOGLE_SKIP_SIGNATURE=true for a public bucket",
}
_ENDPOINTS = {
    "s3": "AWS_ENDPOINT_URL and AWS_REGION name another endpoint and region",
    "gs": "gcs_base_url in GOOGLE_SERVICE_ACCOUNT_KEY names another endpoint",
}
_DENIED = "403: these credentials may not list and read it: grant both, or give others"
_ABSENT = "404: there is no such bucket or object"
_METADATA_SERVICES = ("169.254.169.254", "metadata.google.internal", "169.254.170.")
_PLAIN_HTTP = re.compile(r'(^|")http://')


class ObjectStoreSource:
    """A folder of a bucket: `s3://bucket/path` or `gs://bucket/path`, with the model's files below it."""

    def __init__(self, uri: str, environment: Mapping[str, str] = os.environ) -> None:
        """Raises FetchError if the URI has no bucket, or obstore is not installed. Sends no request."""
        self._scheme, _, rest = uri.partition("://")
        self._uri, (bucket, _, path) = uri.rstrip("/"), rest.partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise FetchError(f"{uri}: {bucket!r} is no name of a bucket: write {self._scheme}://bucket/path")
        self._prefix = path.strip("/")
        try:
            self._store = _store(self._scheme, bucket, environment)
        except ImportError:
            raise FetchError(f"{uri}: obstore is not installed here: {install_hint('engine')}") from None
        self._tags: dict[str, str | None] = {}
        self._sizes: dict[str, int] = {}

    def files(self) -> list[SourceFile]:
        """Returns the files of the folder's manifest, or else those that belong to a model."""
        found = self._list()
        if MANIFEST_NAME in found:
            return recorded(parse_manifest(self._manifest(), f"{self._uri}/{MANIFEST_NAME}").files)
        names = [name for name in sorted(found) if name.endswith(MODEL_SUFFIXES) and not _is_hidden(name)]
        if not any(name.endswith((".safetensors", ".gguf")) for name in names):
            raise FetchError(f"{self._uri} has no .safetensors and no .gguf file: name the folder of a model")
        return [SourceFile(checked_name(name, self._uri), found[name]) for name in names]

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yields the contents of a file in order, by ranges that are requested ahead of their use."""
        size = self._sizes.get(name)
        if size is None:
            raise FetchError(f"{self._uri}/{name} is not there")
        starts = iter(range(0, size, PART_BYTES))
        with ThreadPoolExecutor(PARTS_IN_FLIGHT) as pool:
            parts: deque[Future[bytes]] = deque()
            try:
                for start in starts:
                    parts.append(pool.submit(self._part, name, start, min(start + PART_BYTES, size)))
                    if len(parts) == PARTS_IN_FLIGHT:
                        yield parts.popleft().result()
                while parts:
                    yield parts.popleft().result()
            finally:
                for part in parts:
                    part.cancel()

    def _list(self) -> dict[str, int]:
        """Returns the sizes of all objects of the folder, by their names in it."""
        start = f"{self._prefix}/" if self._prefix else ""
        with self._errors(self._uri):
            for page in self._store.list(prefix=self._prefix or None):
                for item in page:
                    name = str(item["path"]).removeprefix(start)
                    self._sizes[name], self._tags[name] = int(item["size"]), item["e_tag"]
                if len(self._sizes) > _MOST_OBJECTS:
                    raise FetchError(f"{self._uri} has over {_MOST_OBJECTS:,} objects: name the folder of one model")
        return self._sizes

    def _manifest(self) -> str:
        if self._sizes[MANIFEST_NAME] > MOST_INDEX_BYTES:
            raise FetchError(f"{self._uri}/{MANIFEST_NAME} is larger than {MOST_INDEX_BYTES:,} bytes")
        try:
            return b"".join(self.chunks(MANIFEST_NAME)).decode()
        except UnicodeDecodeError:
            raise FetchError(f"{self._uri}/{MANIFEST_NAME} is not UTF-8") from None

    def _part(self, name: str, start: int, end: int) -> bytes:
        """Returns a range of an object, if it is still the one that was listed."""
        key = f"{self._prefix}/{name}" if self._prefix else name
        options: GetOptions = {"range": (start, end)}
        if (tag := self._tags.get(name)) is not None:
            options["if_match"] = tag
        with self._errors(f"{self._uri}/{name}"):
            part = bytes(self._store.get(key, options=options).bytes())
        if len(part) != end - start:
            raise FetchError(f"{self._uri}/{name} broke off after {start + len(part):,} bytes: run it again")
        return part

    @contextmanager
    def _errors(self, where: str) -> Iterator[None]:
        """Raises obstore's errors as FetchErrors that say what to do."""
        from obstore import exceptions

        try:
            yield
        except exceptions.UnauthenticatedError:
            remedy = self._unauthenticated
        except exceptions.PermissionDeniedError:
            remedy = _DENIED
        except (exceptions.NotFoundError, FileNotFoundError):
            remedy = _ABSENT
        except exceptions.PreconditionError:
            remedy = "it was changed while it was copied: run it again"
        except (exceptions.BaseError, OSError, ValueError) as error:
            remedy = self._other(str(error))
        else:
            return
        raise FetchError(f"{where}: {remedy}")

    @property
    def _unauthenticated(self) -> str:
        return f"401: the credentials are missing, or not valid: give {_CREDENTIALS[self._scheme]}"

    def _other(self, message: str) -> str:
        """Returns the remedy for an error that has no class: obstore quotes the request and what became of it."""
        first = " ".join(message.partition("\n\nDebug source:")[0].split())[:300]
        if any(service in message for service in _METADATA_SERVICES):
            return f"there are no credentials: give {_CREDENTIALS[self._scheme]}"
        if "401 Unauthorized" in message:
            return self._unauthenticated
        if "AccessDenied" in message or "403 Forbidden" in message:
            return _DENIED
        if "NoSuchBucket" in message or "404 Not Found" in message:
            return _ABSENT
        if "PermanentRedirect" in message or "AuthorizationHeaderMalformed" in message:
            return f"the bucket is in another region: set AWS_REGION ({first})"
        return f"{first}. {_ENDPOINTS[self._scheme]}"


def _store(scheme: str, bucket: str, environment: Mapping[str, str]) -> "ObjectStore":
    from obstore.store import GCSStore, S3Store

    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_SERVICE_ACCOUNT_KEY")
    plain = any(_PLAIN_HTTP.search(environment.get(name, "")) for name in names)
    retries: Any = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}
    options: Any = {"allow_http": plain, "timeout": "120s", "connect_timeout": "10s"}
    if scheme == "gs":
        return GCSStore(bucket, client_options=options, retry_config=retries)
    return S3Store(bucket, client_options=options, retry_config=retries)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
