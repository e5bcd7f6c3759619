"""How far a pass is, as runners tell it before they launch one."""

import pytest
import torch

from mini_infer_engine.core.batch import Batch, Row
from mini_infer_engine.core.kv_transfer import LayerProgress
from mini_infer_engine.core.request import SamplingParams
from mini_infer_engine.models.registry import read_config
from mini_infer_engine.runtime.cpu.executor import TorchExecutor
from mini_infer_engine.runtime.inputs.layer_progress import LayerCounters
from mini_infer_engine.runtime.model_runner import make_runner
from tests.support.tiny_models import save_tiny_model, tiny_runner


def test_a_cpu_pass_reports_layer_progress(tmp_path) -> None:  # type: ignore[no-untyped-def]  # pytest's folder
    save_tiny_model(tmp_path, "qwen3")
    settings = tiny_runner(tmp_path).settings
    runner = make_runner(settings, read_config(tmp_path), tmp_path, TorchExecutor, reports_layers=True)
    reported: list[tuple[LayerProgress, int]] = []

    def report(layers: LayerProgress) -> None:
        reported.append((layers, layers.num_done()))

    row = Row(0, 0, 5, [1, 2, 3, 4, 5], [0], SamplingParams())
    runner.collect(runner.launch(Batch([row], 0, report_layers=report)))
    [(layers, at_first)] = reported
    assert (at_first, layers.num_done()) == (0, runner.kv_memory().layout.num_layers)


@pytest.mark.parametrize("last", [0, 2**31 - 3])
def test_layer_progress_is_done_when_the_pass_or_a_later_one_computed_it(last: int) -> None:
    counters = LayerCounters(3, torch.device("cpu"))
    counters._last = last
    counters._newest.fill_(last)
    passes = [counters.begin() for _ in range(4)]
    number = counters._number.clone()
    counters._newest.copy_(torch.tensor([passes[2].number, passes[1].number, passes[0].number]))
    assert [one.num_done() for one in passes] == [3, 2, 1, 0]
    assert number.item() == passes[-1].number
