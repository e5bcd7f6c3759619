"""Writes the demo model and wrong copies of it, for measurements of canaries: `python models.py FOLDER`.

It needs the engine's package and nothing of this repository, so that it runs in a pod, too.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import mini_infer_engine

ASSETS = Path(mini_infer_engine.__file__).parent / "assets" / "demo"
BASE = "base"
QUESTIONS = (
    "What does textwrap.dedent do?",
    "How do I read a file line by line?",
    "What is the difference between a list and a tuple?",
    "How does asyncio.gather work?",
    "What does functools.lru_cache do?",
)


def make_models(folder: Path) -> None:
    """Writes the demo model, and two wrong copies of it."""
    for name in (BASE, "template", "quantised"):
        shutil.copytree(ASSETS, folder / name)
    template = folder / "template" / "chat_template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")
    weights = folder / "quantised" / "model.safetensors"
    save_file({name: _rounded(tensor) for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a matrix rounded to three bits with one scale for all, where there should be one for each group."""
    if tensor.ndim < 2:
        return tensor
    scale = tensor.float().abs().max() / 3
    return ((tensor.float() / scale).round() * scale).to(tensor.dtype)


if __name__ == "__main__":
    make_models(Path(sys.argv[1]))
