import resource
import subprocess
import sys

import pytest

CODE = """
import resource
from mini_infer_process.open_files import raise_open_file_limit
print(raise_open_file_limit({desired}), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "desired", "in_force"),
    [(100, 900, 500, 500), (100, 900, 5000, 900), (600, 900, 500, 600), (900, 900, 5000, 900)],
)
def test_the_open_files_limit_is_raised_and_never_lowered(soft: int, hard: int, desired: int, in_force: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(desired=desired)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [str(in_force), str(in_force), str(hard)]
