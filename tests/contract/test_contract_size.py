from pathlib import Path

import mini_infer_contract

MAX_LINES = 1_500


def test_the_contract_stays_small_when_it_grows_by_what_crosses_no_process() -> None:
    files = Path(mini_infer_contract.__file__).parent.rglob("*.py")
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert lines <= MAX_LINES, f"{lines} lines: a package that one process uses is a better home for some of them"
