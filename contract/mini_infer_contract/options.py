"""Options declared once: a struct whose fields have a type, a default, a docstring and an `Option`.

Flags, settings, the resource's fields and the page of options are made from these rows. Knows no option of its own.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Facts about an option that its field's type, default and docstring do not carry."""

    group: str
    """Heading under which it is listed."""
    unit: str = ""
    """Unit of the value, as help shows it: TOKENS, SECONDS, NAME."""
    default_text: str = ""
    """The meaning of the default, if the value does not say it."""
    low: float | None = None
    """Least value."""
    high: float | None = None
    low_is_allowed: bool = True
    is_size: bool = False
    """True for a number of bytes: a flag takes 512MiB, the resource a quantity such as 512Mi."""
    is_list: bool = False
    """True for a tuple of names: one flag with commas, or several words where `unit` names one."""
    in_resource: bool = False
    """True if the resource's `engine` block has a field of this name."""
    flag: str = ""
    """The flag's name without its two dashes, if it is not the field's name with dashes."""
    aliases: tuple[str, ...] = ()
    """More flags of the same meaning."""
    hints: tuple[tuple[str, str], ...] = ()
    """Values that other servers have for it, and what to write instead."""


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option."""

    name: str
    type: Any
    """The field's type, without None."""
    is_optional: bool
    default: Any
    """The default; `msgspec.NODEFAULT` if the option is required."""
    description: str
    option: Option

    @property
    def flag(self) -> str:
        """The option's flag at a command line."""
        return f"--{self.option.flag or self.name.replace('_', '-')}"

    @property
    def shown_default(self) -> str:
        """The default as help and documentation show it."""
        if self.option.default_text:
            return self.option.default_text
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.option.is_size and isinstance(self.default, int):
            return f"{self.default // 2**20}MiB"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


@cache
def option_rows(struct: type[msgspec.Struct]) -> tuple[OptionRow, ...]:
    """Returns all options of a struct, in its order. Raises TypeError if a field has no `Option` or no docstring."""
    hints = get_type_hints(struct, include_extras=True)
    described = dict(_docstrings(struct))
    rows = []
    for field in msgspec.structs.fields(struct):
        declared = get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else ()
        option = next((part for part in declared[1:] if isinstance(part, Option)), None)
        if option is None or field.name not in described:
            raise TypeError(f"{struct.__name__}.{field.name} needs an Option and a docstring")
        members = get_args(declared[0]) if get_origin(declared[0]) in (Union, UnionType) else (declared[0],)
        kind = next(member for member in members if member is not NoneType)
        default = field.default if field.default is not msgspec.NODEFAULT or field.required else field.default_factory()
        rows.append(OptionRow(field.name, kind, NoneType in members, default, described[field.name], option))
    return tuple(rows)


def _docstrings(struct: type) -> Iterator[tuple[str, str]]:
    """Yields field names and the strings under them, of a class and of its base classes."""
    for base in reversed(struct.__mro__[:-1]):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                yield field.target.id, inspect.cleandoc(str(text.value.value)).replace("\n", " ")  # type: ignore[attr-defined]  # an Expr with a Constant, see is_text
