"""Records in pytest's cache which tests never began because a fixture failed, and of what: scripts/failed_tests.py
counts them once.
"""

import pytest

KEY = "cache/setup_errors"


class SetupErrors:
    """A plugin of pytest; workers of xdist leave the record to their controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._causes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps place and message of an error in a test's set-up."""
        crash = getattr(report.longrepr, "reprcrash", None)
        if report.when == "setup" and report.failed and crash is not None:
            self._causes[report.nodeid] = f"{crash.path}:{crash.lineno}: {crash.message}"

    def pytest_sessionfinish(self) -> None:
        """Writes the record, in which an earlier run's has no place."""
        cache = getattr(self._config, "cache", None)  # None with `-p no:cacheprovider`
        if cache is not None and not hasattr(self._config, "workerinput"):
            cache.set(KEY, self._causes)


def pytest_configure(config: pytest.Config) -> None:
    """Adds the plugin where this module is named by `-p`."""
    config.pluginmanager.register(SetupErrors(config))
