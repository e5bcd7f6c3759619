"""One browser for all tests of the console."""

from collections.abc import Iterator

import pytest

from tests.support.chromium import Browser, require_chromium


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    require_chromium()
    with Browser() as found:
        yield found
