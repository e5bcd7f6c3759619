"""Tests the progress of loading weights: bytes, speed and what remains, in the log."""

import logging
from pathlib import Path

import pytest
import torch

from mini_infer_engine.config.parallelism.tensor_parallel import TensorParallel
from mini_infer_engine.layers.placement import Part
from mini_infer_engine.models.weights.checkpoint import StoredTensor
from mini_infer_engine.models.weights.progress import INTERVAL_S, LoadProgress, progress_line
from tests.support.tiny_models import save_tiny_model, tiny_runner


@pytest.mark.parametrize(
    ("done", "total", "elapsed_s", "line"),
    [
        (0, 140_100_000_000, 3.0, "0 of 140.1 GB"),
        (31_400_000_000, 140_100_000_000, 15.0, "31.4 of 140.1 GB, 2.1 GB/s, 52 s remaining"),
        (140_100_000_000, 140_100_000_000, 70.0, "140.1 of 140.1 GB, 2.0 GB/s, 0 s remaining"),
    ],
)
def test_a_line_has_bytes_speed_and_the_rest_when_some_are_loaded(
    done: int, total: int, elapsed_s: float, line: str
) -> None:
    assert progress_line(done, total, elapsed_s) == line


def test_lines_come_at_intervals_and_at_the_end_when_a_load_is_long(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    progress = LoadProgress(40_000_000_000, lambda: now[0], shows_bar=False)
    for _ in range(40):
        now[0] += INTERVAL_S / 4
        progress.add(1_000_000_000)
    progress.close()
    assert len(caplog.messages) == 10
    assert caplog.messages[0] == "weights: 4.0 of 40.0 GB, 0.4 GB/s, 90 s remaining"
    assert caplog.messages[-1] == "weights: 40.0 GB loaded in 100.0 s, 0.4 GB/s"


def test_the_log_has_one_line_when_a_load_is_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    save_tiny_model(tmp_path, "llama")
    tiny_runner(tmp_path)
    assert len([line for line in caplog.messages if line.startswith("weights: ")]) == 1


def test_bytes_are_those_of_the_part_that_a_rank_reads_when_a_tensor_is_not_encoded() -> None:
    part = Part(0, TensorParallel(1, 4).even(64))
    plain = StoredTensor(Path("x"), (64, 32), torch.bfloat16)
    encoded = StoredTensor(Path("x"), (64, 32), torch.float32, encoded_bytes=1152)
    assert [plain.bytes_read(None), plain.bytes_read(part)] == [4096, 1024]
    assert [encoded.bytes_read(None), encoded.bytes_read(part)] == [1152, 1152]
