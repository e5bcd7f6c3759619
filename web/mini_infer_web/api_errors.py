"""Errors in OpenAI's shape, the same from an engine and from the gateway."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import msgspec

FieldPath = tuple[str | int, ...]
"""The place of a field in a request: keys of objects and indexes of lists, from the outside in."""
Rename = Callable[[FieldPath], FieldPath]
"""Maps a field of the request that is checked to the one that the client has sent."""

MAX_QUOTED = 200
"""Characters of a client's own words, such as a field's name, in an error."""
MAX_MODELS = 50
"""Names of served models in an error."""
_SEARCHED_BYTES = 1 << 18
"""Bytes of a refused body in which the reason is searched: it takes up to 10 ms, in which nothing else runs."""
_HALF_OF_A_PAIR = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
    rb"(\\u[dD][89a-fA-F][0-9a-fA-F]{2})",
    re.DOTALL,
)
"""Matches up to the first escape of half of a surrogate pair, from a body's beginning."""
_MAX_FAULTS = 10
"""Fields that one error names."""


def field_name(path: FieldPath) -> str:
    """Returns the path as clients read it, such as "messages[2].content", with long names cut."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{shortened(part)}" for part in path)
    return shortened("".join(parts).removeprefix("."))


def shortened(text: str) -> str:
    """Returns the text, or its beginning where it has more than `MAX_QUOTED` characters."""
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 3]}..."


@dataclass(frozen=True, slots=True)
class Fault:
    """One field, and what is wrong with it."""

    path: FieldPath
    rest: tuple[str | FieldPath, ...]
    """The sentence behind the field's name; a path in it stands for another field's name."""
    code: str | None = None

    @property
    def sentence(self) -> str:
        """The whole sentence, with the names of the fields."""
        return "".join(part if isinstance(part, str) else field_name(part) for part in (self.path, *self.rest))

    def renamed(self, rename: Rename) -> "Fault":
        """Returns the same fault with other names of fields; words that are no field's name stay as they are."""
        rest = tuple(part if isinstance(part, str) else rename(part) for part in self.rest)
        return Fault(rename(self.path), rest, self.code)


def renaming(names: Mapping[FieldPath, FieldPath]) -> Rename:
    """Returns what renames a path by the longest of `names` that it begins with; other paths stay as they are."""
    lengths = sorted({len(path) for path in names}, reverse=True)

    def rename(path: FieldPath) -> FieldPath:
        for length in lengths:
            if path[:length] in names:
                return names[path[:length]] + path[length:]
        return path

    return rename


class ApiError(Exception):
    """A request that cannot be served; the message names the thing, the value and the remedy.

    `param` is the field at fault, `code` a stable machine-readable reason such as "model_not_found".
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | FieldPath | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        path = (param,) if isinstance(param, str) else param or ()
        name = field_name(path)
        self.status = status
        self.message = message
        self.param = name or None
        self.code = code
        self.headers = headers or {}
        is_about_it = path and message.startswith(name)
        self.faults: tuple[Fault, ...] = (Fault(path, (message.removeprefix(name),), code),) if is_about_it else ()
        """The fields that the message is about, as data; empty where it does not begin with one."""
        self._path = path

    @classmethod
    def of_faults(cls, faults: Sequence[Fault], status: int = 400, headers: dict[str, str] | None = None) -> Self:
        """Returns the error of these faults, of which there is at least one. The first gives `param` and `code`."""
        more = len(faults) - _MAX_FAULTS
        message = "; ".join(fault.sentence for fault in faults[:_MAX_FAULTS]) + (
            f"; and {more} more" if more > 0 else ""
        )
        error = cls(status, message, param=faults[0].path, code=faults[0].code, headers=headers)
        error.faults = tuple(faults)
        return error

    def renamed(self, rename: Rename) -> "ApiError":
        """Returns the same error with the names that its fields have in the client's request."""
        if self.faults:
            return ApiError.of_faults([fault.renamed(rename) for fault in self.faults], self.status, self.headers)
        param = rename(self._path) if self._path else self.param
        return ApiError(self.status, self.message, param=param, code=self.code, headers=self.headers)

    def body(self) -> dict[str, Any]:
        """The JSON body, https://platform.openai.com/docs/guides/error-codes."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def refuse_field(where: str | FieldPath, *rest: str | FieldPath, code: str | None = None) -> NoReturn:
    """Raises the 400 of the field at `where`; `rest` is the sentence behind its name."""
    path = (where,) if isinstance(where, str) else where
    raise ApiError.of_faults([Fault(path, (" ", *rest), code)])


def known_models(served: Sequence[str]) -> str:
    """Returns the served names for an error, which has a bounded length however many and long they are."""
    shown = [shortened(name) for name in served[:MAX_MODELS]]
    return (
        ", ".join(shown + ([f"and {len(served) - MAX_MODELS} more"] if len(served) > MAX_MODELS else [])) or "none yet"
    )


def unknown_model(model: str, served: Sequence[str]) -> ApiError:
    """Returns the 404 of an unknown model name."""
    named = repr(shortened(model))
    message = f"the model {named} does not exist; models here: {known_models(served)}"
    return ApiError(404, message, param="model", code="model_not_found")


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """The form in which an API reports errors."""

    body: Callable[[ApiError, str], dict[str, Any]]
    """The JSON object of an error's answer; the second is the request's id."""
    event_name: str = ""
    """Name of the server-sent event that ends a stream with an error; "" if it has no name, as OpenAI's have none."""
    id_header: str = ""
    """The API's own header for the request's id, beside x-request-id; "" if it has none."""

    def event(self, error: ApiError, request_id: str) -> bytes:
        """The server-sent event that ends a stream with `error`."""
        name = f"event: {self.event_name}\n".encode() if self.event_name else b""
        return name + b"data: " + msgspec.json.encode(self.body(error, request_id)) + b"\n\n"


OPENAI_ERRORS = ErrorShape(lambda error, request_id: error.body())


def context_length(max_model_len: int) -> str:
    """Returns the length of the context in the words by which OpenAI's clients recognise a prompt that is too long."""
    return f"this model's maximum context length is {max_model_len} tokens (max_model_len)"


def read_json_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a request's body. Raises ApiError 400, which says where the body goes wrong, if it is
    none.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request body is no JSON: {json_fault(body, error)}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the request body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


def json_fault(body: bytes, error: Exception) -> str:
    """Returns what is wrong with a body that msgspec has refused with `error`.

    msgspec calls a body truncated where a text has half of a character, as JavaScript's JSON.stringify writes one that
    was cut within an emoji.
    """
    half = None if isinstance(error, RecursionError) else _HALF_OF_A_PAIR.match(body, 0, _SEARCHED_BYTES)
    if half is None:
        return str(error)
    return (
        f"a text has half of a surrogate pair, {half[1].decode()} (byte {half.start(1)}): it was cut within a character"
    )


_TYPES = {403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
