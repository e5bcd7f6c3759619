"""A Chromium that looks at the console: console/tests/browser.mjs (playwright-core) as a process, a line a command."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

import pytest

CONSOLE = Path(__file__).parents[2] / "console"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NODE, NPM = shutil.which("node"), shutil.which("npm")
INSTALL_LIMIT_S = 180


def require_chromium() -> None:
    """Skips a test where there is no browser, or where `require_npm` does."""
    if BROWSER is None:
        pytest.skip("there is no browser: apt-get install chromium")
    require_npm()


def require_npm() -> None:
    """Skips a test where there is no Node, or where npm cannot install the console's packages."""
    if NODE is None or NPM is None:
        pytest.skip("there is no Node with npm: apt-get install nodejs npm")
    if all((CONSOLE / "node_modules" / name).exists() for name in ("playwright-core", "axe-core", "vite")):
        return
    command = [NPM, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(command, cwd=CONSOLE, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    if done.returncode:
        pytest.skip(f"npm ci in {CONSOLE} failed: {done.stderr[-300:]}")


class Browser:
    """One browser with one page, which `open` makes new."""

    def __init__(self) -> None:
        command = [str(NODE), "tests/browser.mjs", str(BROWSER)]
        self._process = subprocess.Popen(
            command,
            cwd=CONSOLE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOME": "/tmp"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __call__(self, command: str, **given: Any) -> Any:
        """Runs a command of browser.mjs; fails with what the page shows."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"command": command, **given}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the browser's process has ended with {self._process.poll()}"
        reply = json.loads(answer)
        assert "error" not in reply, reply["error"]
        return reply["value"]
