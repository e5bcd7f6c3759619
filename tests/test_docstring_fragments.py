from pathlib import Path

import pytest

from scripts.docstring_fragments import PACKAGES, docstrings, is_fragment
from tests.support.checkout import PARTS


@pytest.mark.parametrize(
    "text",
    [
        "Returns the pages of a sequence.",
        "A pool of pages, all layers of a page together.",
        "Seconds between two heartbeats.",
        "True if the engine drains.",
        "After `done`, nothing reads our pages.",
        "These are the pages that transfers pin.",
    ],
)
def test_a_docstring_is_whole_when_its_first_clause_can_be_read_alone(text: str) -> None:
    assert not is_fragment(text)


@pytest.mark.parametrize(
    "text",
    [
        "Of one stream.",
        "What is told to peers.",
        "See `Transport.start`.",
        "The same of beams.",
        "Whether it has ended.",
        "By rank there.",
        "How pages are copied.\n\nThis has a second paragraph.",
    ],
)
def test_a_docstring_is_a_fragment_when_its_first_clause_needs_the_code_above(text: str) -> None:
    assert is_fragment(text)


def test_docstrings_of_attributes_are_found_when_they_follow_an_assignment(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""Module."""\nLIMIT = 3\n"""Pages."""\nprint()\n"""Not one."""\n')
    assert [(one.line, one.text) for one in docstrings(file)] == [(1, "Module."), (3, "Pages.")]


def test_every_package_is_counted_when_the_script_has_no_arguments() -> None:
    assert set(PACKAGES) == set(PARTS)
