"""Implements `mini-infer models`: prints which architectures run, by which implementation, with which features."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from mini_infer_engine.config.model.transformers_architectures import REFUSED
from mini_infer_engine.models.support import ModelSupport, supported_models

_DESCRIPTION = """\
List the architectures (`architectures` of config.json) that are tested, with the implementation that runs them. Others
run through transformers if their attention asks for nothing that the kernels lack, which a start finds out.
"""
_HEADINGS = ("ARCHITECTURE", "IMPLEMENTATION", "CPU", "GPU", "TP", "QUANTISED", "GGUF", "SPECULATION")


def table(models: Sequence[ModelSupport]) -> list[str]:
    """Returns the lines of a table with a heading."""
    rows = [_HEADINGS, *map(_row, models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def _row(model: ModelSupport) -> tuple[str, ...]:
    flags = (model.tensor_parallel, model.quantised, model.gguf)
    answers = ("yes" if flag else "no" for flag in flags)
    cpu = "yes" if model.cpu else "no"
    speculation = ", ".join(model.speculation) if model.generates else "generates no text: embeddings and scores"
    return (model.architecture, model.implementation, cpu, model.gpu, *answers, speculation)


def as_json() -> str:
    """Returns models that run, and models that are refused, for programs."""
    refused = [{"architecture": name, "reason": reason} for name, reason in REFUSED.items()]
    return json.dumps({"models": [asdict(model) for model in supported_models()], "refused": refused}, indent=2)


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(prog="mini-infer models", description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print JSON, with the refused architectures and reasons")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the list. Returns the exit code."""
    options = build_parser().parse_args(arguments)
    print(as_json() if options.json else "\n".join(table(supported_models())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
