import subprocess
import sys
from pathlib import Path


def test_a_rank_exits_silently_when_the_first_one_is_gone(tmp_path: Path) -> None:
    """As after Ctrl-C while a group starts."""
    command = [sys.executable, "-m", "mini_infer_engine.distributed.rank_process", str(tmp_path / "rank-1.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
