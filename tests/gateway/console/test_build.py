"""The built page is that of its sources, and all of it is in the package."""

import filecmp
import hashlib
import json
import re
import subprocess
from pathlib import Path

import pytest

from mini_infer_gateway.console.files import ASSETS, FILES
from tests.support.chromium import CONSOLE, NPM, require_npm

SOURCES = ("index.html", "package-lock.json", "package.json", "public", "src", "tsconfig.json", "vite.config.mjs")


def sources_hash() -> str:
    """What console/vite.config.mjs records in the build."""
    paths = [CONSOLE / name for name in SOURCES]
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    names = sorted(file.relative_to(CONSOLE).as_posix() for file in files)
    found = hashlib.sha256()
    for name in names:
        found.update(f"{name}\0".encode() + (CONSOLE / name).read_bytes() + b"\0")
    return found.hexdigest()


@pytest.mark.skipif(not CONSOLE.exists(), reason="the console's sources are not here")
def test_the_build_is_of_these_sources_when_they_have_changed() -> None:
    recorded = json.loads((ASSETS / "build.json").read_text())["sources"]
    assert recorded == sources_hash(), "make console builds the page again: commit what it writes"


def test_every_file_that_the_page_names_is_served_when_it_is_loaded() -> None:
    page = (ASSETS / "index.html").read_text()
    named = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert set(named) <= set(FILES)
    assert {*FILES.values(), "build.json"} == {file.name for file in ASSETS.iterdir()}


def test_the_page_has_no_script_and_no_style_in_it_when_the_policy_allows_files_alone() -> None:
    page = (ASSETS / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert "<style" not in page
    assert "style=" not in page
    for name in ("console.js", "console.css", "index.html"):
        text = (ASSETS / name).read_text()
        assert not re.search(r"(?:src|href|url\()[=(\"' ]*https?://", text), f"{name} loads something from elsewhere"


def test_the_committed_build_is_what_npm_makes_when_the_page_is_built_again(tmp_path: Path) -> None:
    require_npm()
    built = subprocess.run(
        [str(NPM), "run", "build", "--", "--outDir", str(tmp_path), "--logLevel", "error"],
        cwd=CONSOLE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    files = sorted(file.name for file in ASSETS.iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == files
    _, differing, missing = filecmp.cmpfiles(ASSETS, tmp_path, files, shallow=False)
    assert not differing + missing, "make console builds the page again: commit what it writes"
