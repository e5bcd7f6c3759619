"""Compares quantisation schemes side by side: their effect on a model's predictions, memory and speed."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from mini_infer_engine import __version__
from mini_infer_engine.config.options.settings import EngineSettings
from mini_infer_engine.device import choose_device
from mini_infer_engine.model_path import DEMO_DIRECTORY, resolve_model
from mini_infer_engine.models.kv_spec import KV_QUANTIZATIONS
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime.worker import dtype_of
from mini_infer_engine.tools.compare.measure import Baseline, measure
from mini_infer_engine.tools.compare.report import draw, table, unknown_picture
from mini_infer_engine.tools.compare.texts import Questions, Text, demo_texts, read_texts
from mini_infer_process.command_line import whole_number
from mini_infer_process.logs import show_crashes

SCHEMES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
    "int4": {"quantization": "int4"},
    "int4-nearest": {"quantization": "int4", "quantization_calibration": "none"},
    "w8a8-int8": {"quantization": "w8a8-int8"},
    "w8a8-int8-plain": {"quantization": "w8a8-int8", "quantization_calibration": "none"},
}
"""Settings of each scheme. bf16 is the unquantised model in `--dtype`, and is shown as fp32 if that is its dtype."""
_KV_MARK = ", KV "
"""Separates a scheme from its KV cache dtype in the names of columns."""
_CPU_KV_CACHE_BYTES = 64_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    show_crashes()
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"--plot {options.plot}: matplotlib is not installed: pip install matplotlib, or leave it out")
    if (fault := _fault_of_files(options)) is not None:  # said before minutes are spent
        parser.error(fault)
    try:
        figures = compare(options)
    except (ValueError, OSError) as error:
        print(f"mini-infer-compare: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(figures))
    if options.json is not None:
        options.json.write_text(json.dumps({"model": options.model, "figures": figures}, indent=1) + "\n")
    if options.plot is not None:
        draw(figures, options.plot)
    return 0


def _fault_of_files(options: argparse.Namespace) -> str | None:
    """Returns why the results cannot be written to the given paths, or None if they can."""
    for flag, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            return f"{flag} {path}: name a file in a folder that there is"
    if options.plot is not None and (endings := unknown_picture(options.plot)):
        return f"--plot {options.plot}: its name must end in one of {', '.join(endings)}"
    return None


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's flags."""
    parser = argparse.ArgumentParser(
        prog="mini-infer-compare",
        description=__doc__,
        epilog="Perplexity, the share of equal first choices (teacher-forced) and the divergence (KL) are of the "
        "answers of the demo evaluation's chats with --model demo in a checkout, else of Python's sources or --texts. "
        "The first scheme is what the others are compared with.",
    )
    scheme_names = ", ".join(SCHEMES)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--model", default="demo", metavar="DIR", help="a folder, a hub id, or demo (default)")
    parser.add_argument(
        "--schemes",
        default="bf16,int8,fp8,int4",
        metavar="NAME,...",
        help=f"of {scheme_names}; or folders of checkpoints of the same model, as of AWQ (default: bf16,int8,fp8,int4)",
    )
    parser.add_argument(
        "--kv",
        default="",
        metavar="NAME,...",
        help="each scheme also with its keys and values kept so, in a column of its own: fp8, int8 (default: none)",
    )
    parser.add_argument("--texts", type=Path, metavar="FILE", help="a text to predict in place of the usual ones")
    parser.add_argument(
        "--limit", type=whole_number(1), default=40, metavar="N", help="texts, and questions of each sort (default: 40)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of activations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures are written")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where a picture is drawn (PNG, SVG; matplotlib)")
    return parser


def compare(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Returns the figures of each scheme. Raises ValueError if a scheme is unknown, or cannot load the model."""
    schemes = {name: settings_of(name, options) for name in columns(options.schemes, options.kv)}
    folder = resolve_model(options.model, None)
    texts, questions = tests_of(folder, options)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    baseline, figures = Baseline(), {}
    for name, settings in schemes.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        figures[_shown(name, settings)] = measure(settings, texts, questions, tokenizer.decode, baseline)
    return figures


def _shown(column: str, settings: EngineSettings) -> str:
    """Returns the column's name, with the dtype of weights that are not quantised: on a CPU they are fp32."""
    scheme, mark, kv = column.partition(_KV_MARK)
    if scheme != "bf16":
        return column
    dtype = dtype_of(settings, read_config(resolve_model(settings.model, None)), choose_device(settings))
    return ("fp32" if dtype == torch.float32 else scheme) + mark + kv


def columns(schemes: str, kv: str) -> list[str]:
    """Returns the names of the columns: each scheme, then the same with each KV cache dtype."""
    variants = [_KV_MARK + variant for variant in kv.split(",") if variant]
    return list(dict.fromkeys(scheme + variant for scheme in schemes.split(",") for variant in ("", *variants)))


def settings_of(column: str, options: argparse.Namespace) -> EngineSettings:
    """Returns the engine's settings for one of `columns`. Raises ValueError if it is neither a scheme nor a folder."""
    model = options.model
    scheme, _, kv = column.partition(_KV_MARK)
    if kv and kv not in KV_QUANTIZATIONS:
        raise ValueError(f"--kv {kv}: it is none of {', '.join(KV_QUANTIZATIONS)}.")
    if scheme not in SCHEMES:
        if not scheme or not Path(scheme).is_dir():
            raise ValueError(f"--schemes {scheme}: it is none of {', '.join(SCHEMES)}, and no folder of a checkpoint.")
        model = scheme
    own: dict[str, Any] = {"kv_cache_memory": _CPU_KV_CACHE_BYTES} if options.device == "cpu" else {}
    own["kv_cache_dtype"] = kv or "auto"
    return EngineSettings(
        model=model,
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=16,
        enable_prefix_caching=False,
        **own,
        **SCHEMES.get(scheme, {}),
    )


def tests_of(folder: Path, options: argparse.Namespace) -> tuple[list[Text], list[Questions]]:
    """Returns texts, and questions of the demo evaluation if it is available. Raises ValueError if there is no text."""
    demo = demo_texts(options.limit) if options.texts is None and folder == DEMO_DIRECTORY else None
    if demo is not None:
        return demo
    texts = read_texts(folder, options.texts, options.limit)
    if not texts:
        raise ValueError(f"--texts {options.texts}: no text of at least two tokens.")
    return texts, []
