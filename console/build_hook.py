"""Builds the console's page by npm while hatchling builds a wheel. A wheel made without npm has the committed build.

MINI_INFER_CONSOLE=committed leaves npm out where it is installed; MINI_INFER_CONSOLE=npm ends a build without it.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CHOICES = ("auto", "npm", "committed")


class ConsoleBuildHook(BuildHookInterface[Any]):
    """Runs `npm ci` and `npm run build` in `console/` before files are collected for a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the page, unless the wheel is an editable one, whose page is the committed one.

        Raises:
            ValueError: MINI_INFER_CONSOLE has another value, or npm is asked for and missing.
            subprocess.CalledProcessError: npm failed.
        """
        del build_data
        choice = os.environ.get("MINI_INFER_CONSOLE", "auto")
        if choice not in CHOICES:
            raise ValueError(f"MINI_INFER_CONSOLE={choice}: it must be one of {', '.join(CHOICES)}")
        npm = shutil.which("npm")
        if choice == "committed" or version == "editable" or (npm is None and choice == "auto"):
            return
        if npm is None:
            raise ValueError("MINI_INFER_CONSOLE=npm: npm is missing, install Node 20 or newer")
        sources = Path(self.root) / "console"
        for command in (["ci", "--no-audit", "--no-fund", "--ignore-scripts"], ["run", "build"]):
            subprocess.run([npm, *command], cwd=sources, check=True)
