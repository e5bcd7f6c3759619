"""docs/troubleshooting.md explains every reason and every condition that a user can meet."""

import re
from pathlib import Path
from typing import get_args

from mini_infer_operator.resource import REASONS, Condition

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
FIRST_CELLS = "\n".join(line.split("|")[1] for line in PAGE.splitlines() if line.startswith("|"))
NAMED = set(re.findall(r"`([A-Za-z]+)`", FIRST_CELLS))


def test_troubleshooting_explains_every_reason_and_condition() -> None:
    conditions = set(get_args(Condition.model_fields["type"].annotation))
    assert len(REASONS) > 20
    assert sorted((REASONS | conditions) - NAMED) == []


def test_troubleshooting_explains_no_unknown_reason() -> None:
    conditions = set(get_args(Condition.model_fields["type"].annotation))
    assert sorted(NAMED - REASONS - conditions) == []
