"""One checkpoint of random weights that several engines load, one after another, and that is deleted afterwards."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.budget import Budget
from common.isolation import Figures, isolated
from common.report import log_line


def write_checkpoint(folder: str, target: str, weights: dict[str, Any] | None) -> Iterator[Figures]:
    """Made on the GPU if there is one; in a process of its own, whose memory is freed."""
    import torch

    from common.random_checkpoint import write_random_checkpoint

    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    written = write_random_checkpoint(Path(folder), Path(target), weights, device)
    yield {"checkpoint GB": written / 1e9, "checkpoint written in s": time.perf_counter() - begin}


@contextmanager
def shared_checkpoint(
    folder: str, target: Path, weights: dict[str, Any] | None, budget: Budget
) -> Iterator[dict[str, Any]]:
    """`write_random_checkpoint` of `folder` to `target`, while this lasts; its size and time, or "error": why not."""
    log_line(f"checkpoint {target.name}")
    with budget.spending("checkpoint"):
        written = isolated(
            write_checkpoint,
            folder,
            str(target),
            weights,
            timeout_s=budget.left_s,
            note=lambda part: log_line(f"  {part}"),
        )
    try:
        yield written
    finally:
        shutil.rmtree(target, ignore_errors=True)
