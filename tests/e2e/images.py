"""The project's three images, built from its Dockerfile. The builder is E2E_BUILD's program, else docker."""

import os
import shutil
import time
from pathlib import Path

from tests.e2e.commands import ROOT, run, say

TAG = "e2e"
NAMES = {"gateway": "mini-infer-gateway", "operator": "mini-infer-operator", "engine-cpu": "mini-infer-engine-cpu"}
"""Dockerfile target -> image name, in the order in which they are built."""


def repository(target: str) -> str:
    """The image's name as the cluster knows it. `localhost/` keeps any runtime from asking a registry for it."""
    return f"localhost/{NAMES[target]}"


def build_image(target: str, folder: Path) -> Path:
    """Build one and return its archive. One at a time: the later ones find the layers of the earlier ones."""
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
