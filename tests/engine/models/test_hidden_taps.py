"""Hidden states that are kept while passes are computed."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from mini_infer_engine.models.hidden_taps import HiddenTaps


def test_hidden_taps_copy_the_requested_rows() -> None:
    taps = HiddenTaps([0, 2])
    residual = torch.arange(6.0).view(3, 2)
    taps.begin()
    taps.keep(residual, torch.tensor([2, 0]))
    residual += 10  # the next layer adds to it in place
    last = residual[[2, 0]]
    taps.keep(last, None)
    last += 100
    assert taps.take().tolist() == [[4, 5, 14, 15], [0, 1, 10, 11]]


def test_hidden_taps_are_cleared_when_a_pass_was_not_read() -> None:
    taps = HiddenTaps([0])
    for value in (1.0, 2.0):
        taps.begin()
        taps.keep(torch.full((1, 1), value), None)
    assert taps.take().tolist() == [[2.0]]


def test_hidden_taps_are_separate_for_each_thread() -> None:
    taps = HiddenTaps([0, 1])

    def run(rows: int) -> Tensor:
        taps.begin()
        for layer in range(2):
            taps.keep(torch.full((rows, 1), float(rows + layer)), None)
        return taps.take()

    with ThreadPoolExecutor(4) as threads:
        for rows, made in zip(range(1, 40), threads.map(run, range(1, 40)), strict=True):
            assert made.tolist() == [[rows, rows + 1]] * rows


def test_hidden_taps_are_disabled_unless_recording() -> None:
    taps = HiddenTaps([0], always=False)
    assert not taps.is_enabled
    with taps.recording():
        assert taps.is_enabled
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(lambda: taps.is_enabled).result(), "another thread's pass is its own"
    assert not taps.is_enabled
    assert HiddenTaps([0]).is_enabled
