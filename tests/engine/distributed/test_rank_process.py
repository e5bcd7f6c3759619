import subprocess
import sys
from pathlib import Path


def test_a_rank_whose_first_has_left_before_it_began_says_nothing(tmp_path: Path) -> None:
    """As after Ctrl-C while a group starts."""
    command = [sys.executable, "-m", "mini_infer_engine.distributed.rank_process", str(tmp_path / "rank-1.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
