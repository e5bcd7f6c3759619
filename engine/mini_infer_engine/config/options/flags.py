"""Creates command-line flags from declared options, and options from parsed flags. It knows no option by name."""

import argparse
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from mini_infer_contract.engine_options import BATCHING, KV_TRANSFER, MODEL, PARALLEL, SPECULATION
from mini_infer_contract.options import OptionRow, option_rows
from mini_infer_engine.config.options.option_values import bytes_of, choice_fault, count_of, range_fault

Options = TypeVar("Options", bound=msgspec.Struct)
ENGINE_GROUPS = {
    MODEL: "what is served",
    BATCHING: "the defaults suit most machines",
    PARALLEL: "ranks with a process each, which share the model; see docs/parallelism.md",
    SPECULATION: "several tokens a pass, the same text; see docs/speculation.md",
    KV_TRANSFER: "with a transfer port (--transfer-port or --role), refused without; see docs/disaggregated.md",
}
"""Groups of the engine's flags, with their descriptions."""


def add_flags(parser: argparse.ArgumentParser, struct: type[msgspec.Struct], groups: dict[str, str]) -> None:
    """Adds a flag for each option, in its group. `groups` maps the names of groups to their descriptions."""
    made = {name: parser.add_argument_group(name, about) for name, about in groups.items()}
    for row in option_rows(struct):
        made[row.option.group].add_argument(row.flag, *row.option.aliases, dest=row.name, **_argument(row))


def add_speculative_config(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flag that has all options of speculative decoding in one."""
    parser.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='vLLM\'s form of the options of speculative decoding: {"method": "ngram", "num_speculative_tokens": 4} '
        "(default: the flags of their own)",
    )


def options_from(namespace: argparse.Namespace, struct: type[Options], **changes: Any) -> Options:
    """Returns the struct's part of the parsed flags. Raises ValueError if values do not fit together."""
    values = {row.name: getattr(namespace, row.name) for row in option_rows(struct)} | changes
    return struct(**values)


def _argument(row: OptionRow) -> dict[str, Any]:
    """Returns the keyword arguments of `add_argument` for an option."""
    default = None if row.default is msgspec.NODEFAULT else row.default
    common = {"default": default, "help": f"{row.description.rstrip('.')} (default: {row.shown_default})"}
    if row.type is bool:
        return common | {"action": argparse.BooleanOptionalAction}
    if get_origin(row.type) is Literal:
        choices = get_args(row.type)
        return common | {"choices": choices, "type": _chooser(row) if row.option.hints else type(choices[0])}
    if row.option.is_list and "," not in row.option.unit:
        return common | {"nargs": "+", "action": _AsTuple, "metavar": row.option.unit}
    return common | {"type": _reader(row), "metavar": row.option.unit}


def _chooser(row: OptionRow) -> Callable[[str], str]:
    """Returns a parser that suggests a replacement for values that other servers have."""
    hints = dict(row.option.hints)

    def choose(text: str) -> str:
        if text in hints:
            raise argparse.ArgumentTypeError(f"{text!r}: {choice_fault(row, text)}")
        return text

    return choose


def _reader(row: OptionRow) -> Callable[[str], Any]:
    if row.option.is_size:
        return lambda text: _in_range(byte_size(text), text, row)
    if row.option.is_list:
        return comma_separated
    if row.type in (int, float):
        return lambda text: _number(text, row)
    return str


class _AsTuple(argparse.Action):
    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, tuple(values))


def comma_separated(text: str) -> tuple[str, ...]:
    """Parses names separated by commas, without blanks around them, or a list in JSON, as vLLM has some of them."""
    if text.lstrip().startswith("["):
        try:
            return msgspec.json.decode(text, type=tuple[str, ...])
        except msgspec.DecodeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of strings in JSON: {error}") from None
    return tuple(name.strip() for name in text.split(","))


def byte_size(text: str) -> int:
    """Parses bytes from "512MiB", "2GB", "1.5g" or a plain number."""
    try:
        return bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(text: str, row: OptionRow) -> float | None:
    if row.option.unit == "TOKENS":
        if row.is_optional and text in ("auto", "-1"):
            return None
        return _in_range(count_of(text), text, row)
    try:
        value = row.type(text)
    except ValueError:
        value = None
    return _in_range(value, text, row)


def _in_range(value: float | None, text: str, row: OptionRow) -> float | None:
    if (fault := range_fault(row, value)) is not None:
        raise argparse.ArgumentTypeError(f"{text!r} is not {fault}")
    return value
