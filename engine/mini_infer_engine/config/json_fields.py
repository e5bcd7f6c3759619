"""Reads a model folder's JSON files: every error names the file, the key, the value and the remedy."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from mini_infer_engine.config.errors import ModelError

_REQUIRED = object()
MOST = 2**40
"""The largest size that a file may name: far more than any model has."""


class Fields:
    """A JSON object whose reads fail with the file, the key and the value."""

    def __init__(self, path: Path, values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.values = values
        self.overrides = overrides or {}
        """Values that replace those of the file; they are in `values` already."""

    def overridden(self, overrides: Mapping[str, Any]) -> "Fields":
        """Returns these fields with other values; an object's are merged into the file's (vLLM's `hf_overrides`)."""
        merged = _merged(self.values, overrides)
        return Fields(self.path, merged, {key: merged[key] for key in overrides})

    @staticmethod
    def read(path: Path) -> "Fields":
        """Returns the object in a file. Raises ModelError if there is no file, or it is no JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{path} is missing: name a model folder in Hugging Face format, which has it.") from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read as JSON ({error}): repair it or download it again.") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path} holds a {type(values).__name__}, not a JSON object.")
        return Fields(path, values)

    def refuse(self, key: str, remedy: str) -> ModelError:
        """Returns the error for a value that is not supported; `remedy` ends its sentence."""
        return ModelError(f"{self.path}: {key} = {self.values.get(key)!r}: {remedy}")

    def _get(self, key: str, kinds: tuple[type, ...], default: Any, what: str) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ModelError(f"{self.path}: {key} is missing; it must be {what}.")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.refuse(key, f"must be {what}.")
        return value

    def size(self, key: str, default: Any = ...) -> int:
        """Returns a positive integer; required unless there is a default."""
        value = cast("int", self._get(key, (int,), _REQUIRED if default is ... else default, "a positive integer"))
        if not 0 < value <= MOST:
            raise self.refuse(key, f"must be a positive integer, at most {MOST}.")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Returns an integer, or None if the file says nothing."""
        return cast("int | None", self._get(key, (int,), None, "an integer"))

    def number(self, key: str, default: Any = ...) -> float:
        """Returns a number; required unless there is a default."""
        return self._finite(key, self._get(key, (int, float), _REQUIRED if default is ... else default, "a number"))

    def positive(self, key: str, default: Any = ...) -> float:
        """Returns a number above 0; required unless there is a default."""
        value = self.number(key, default)
        if value <= 0:
            raise self.refuse(key, "must be a positive number.")
        return value

    def _finite(self, key: str, value: float) -> float:
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            number = math.inf
        if not math.isfinite(number):  # Python reads NaN and Infinity, which JSON has not
            raise self.refuse(key, "must be a finite number.")
        return number

    def optional_number(self, key: str) -> float | None:
        """Returns a number, or None if the file says nothing."""
        value = self._get(key, (int, float), None, "a number")
        return None if value is None else self._finite(key, value)

    def positives(self, key: str, default: Any = ...) -> tuple[float, ...]:
        """Returns a list of finite numbers above 0; required unless there is a default."""
        what = "a list of finite positive numbers"
        values = self._get(key, (list,), _REQUIRED if default is ... else default, what)
        numbers = (isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        if not all(numbers) or not all(0 < value <= sys.float_info.max for value in values):
            raise self.refuse(key, f"must be {what}.")
        return tuple(float(value) for value in values)

    def boolean(self, key: str, default: bool) -> bool:
        """Returns a boolean."""
        return cast("bool", self._get(key, (bool,), default, "true or false"))

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Returns one token id or several; () if the file says nothing."""
        value = self._get(key, (int, list), [], "a token id or a list of them")
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise self.refuse(key, "must be a token id or a list of them.")
        return tuple(ids)


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in overrides.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return merged
