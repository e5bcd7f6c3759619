"""The project's three images, built from its Dockerfile. The builder is E2E_BUILD's program, else docker."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.commands import ROOT, run, say

TAG = "e2e"
NAMES = {"gateway": "mini-infer-gateway", "operator": "mini-infer-operator", "engine-cpu": "mini-infer-engine-cpu"}
"""Dockerfile target -> image name."""


def repository(target: str) -> str:
    """The image's name as the cluster knows it. `localhost/` keeps any runtime from asking a registry for it."""
    return f"localhost/{NAMES[target]}"


def build_images(folder: Path) -> dict[str, Path]:
    """Build all three and return an archive of each. Gateway and operator share layers, so one follows the other."""
    with ThreadPoolExecutor(2) as pool:
        engine = pool.submit(_build, "engine-cpu", folder)
        rest = pool.submit(lambda: {target: _build(target, folder) for target in ("gateway", "operator")})
        return {"engine-cpu": engine.result(), **rest.result()}


def _build(target: str, folder: Path) -> Path:
    archive = folder / f"{target}.tar"
    started = time.monotonic()
    if builder := os.environ.get("E2E_BUILD"):
        run(builder, ROOT, f"{NAMES[target]}:{TAG}", archive, "--target", target, timeout_s=600)
    elif shutil.which("docker"):
        image = f"{repository(target)}:{TAG}"
        run("docker", "build", "--target", target, "--tag", image, ROOT, timeout_s=1800)
        run("docker", "save", "--output", archive, image)
    else:
        raise RuntimeError("images need docker, or a program named in E2E_BUILD (CONTEXT NAME:TAG OUT.tar --target T)")
    say(f"built {target} in {time.monotonic() - started:.0f} s, {archive.stat().st_size / 1e6:.0f} MB")
    return archive
