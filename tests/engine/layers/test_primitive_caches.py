import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import python_path

PROGRAM = """
import torch
from mini_infer_engine.layers.linear import blocked_linear, blocked_weight

def anonymous_bytes():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) << 10

torch.set_num_threads(1)
blocked = blocked_weight(torch.ones(256, 256))
blocked_linear(torch.ones(1, 256), blocked)
before = anonymous_bytes()
for rows in range(1, 601):
    blocked_linear(torch.ones(rows, 256), blocked)
print(anonymous_bytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads resident memory from /proc")
def test_memory_is_bounded_when_batches_have_many_sizes() -> None:
    """oneDNN compiles a product for each number of rows: 600 of them would take 390 MB."""
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={"PYTHONPATH": python_path()}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200_000_000
