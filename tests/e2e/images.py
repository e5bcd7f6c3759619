"""The project's three images, built from its Dockerfile. The builder is E2E_BUILD's program, else docker.

`python -m tests.e2e.images FOLDER` builds them beforehand: with E2E_IMAGES=FOLDER the tests take them from there.
"""

import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import IO

from tests.e2e.commands import ROOT, log_line, run

TAG = "e2e"
NAMES = {"gateway": "mini-infer-gateway", "operator": "mini-infer-operator", "engine-cpu": "mini-infer-engine-cpu"}
"""Dockerfile target -> image name, in the order in which they are built."""

PACKAGE = re.compile(r"opt/mini-infer/lib/python3[^/]*/site-packages/([A-Za-z0-9_]+)/")
LABELS = "org.opencontainers.image"
LARGEST_CONTROL_PLANE_MB = 350
"""Megabytes of an image of gateway or operator, python:slim (130 MB) included."""


def repository(target: str) -> str:
    """The image's name as the cluster knows it. `localhost/` keeps any runtime from asking a registry for it."""
    return f"localhost/{NAMES[target]}"


def build_image(target: str, folder: Path) -> Path:
    """Build one of ours and return its archive, once it is found to be as it should."""
    before = Path(os.environ.get("E2E_IMAGES") or folder) / f"{target}.tar"
    if before.exists():
        log_line(f"{target} was built before")
        return before
    archive = build_image_of(ROOT, TAG, target, folder)
    check_image(target, archive)
    return archive


def build_image_of(source: Path, tag: str, target: str, folder: Path) -> Path:
    """Build one of any version. One at a time: the later ones find the layers of the earlier ones."""
    archive = folder / f"{target}-{tag}.tar"
    started = time.monotonic()
    if builder := os.environ.get("E2E_BUILD"):
        run(builder, source, f"{NAMES[target]}:{tag}", archive, "--target", target, timeout_s=1800)
    elif shutil.which("docker"):
        image = f"{repository(target)}:{tag}"
        run("docker", "build", "--target", target, "--tag", image, source, timeout_s=1800)
        run("docker", "save", "--output", archive, image)
    else:
        raise RuntimeError("images need docker, or a program named in E2E_BUILD (CONTEXT NAME:TAG OUT.tar --target T)")
    log_line(f"built {target}:{tag} in {time.monotonic() - started:.0f} s, {archive.stat().st_size / 1e6:.0f} MB")
    return archive


def check_image(target: str, archive: Path) -> None:
    """AssertionError where the image holds what it should not, is too large, lacks labels, or would run as root."""
    with tarfile.open(archive) as tar:
        (manifest,) = json.load(_file(tar, "manifest.json"))
        config = json.load(_file(tar, manifest["Config"]))["config"]
        packages: set[str] = set()
        for layer in manifest["Layers"]:
            stream = _file(tar, layer)
            with tarfile.open(fileobj=stream) as files:
                names = [member.name for member in files if member.isfile()]
            packages |= {match[1] for name in names if (match := PACKAGE.match(name))}
    assert config["User"] == "65532:65532"
    assert {f"{LABELS}.title", f"{LABELS}.version", f"{LABELS}.revision", f"{LABELS}.licenses"} <= set(config["Labels"])
    assert "pip" not in packages
    if target in ("gateway", "operator"):
        assert packages & {"mini_infer_engine", "torch", "setuptools"} == set()
        assert "kubernetes" in packages
        size_mb = archive.stat().st_size / 1e6
        assert size_mb < LARGEST_CONTROL_PLANE_MB, f"{target}: {size_mb:.0f} MB"


def _file(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    stream = tar.extractfile(name)
    assert stream is not None, f"{name} is no file of the archive"
    return stream


def main(folder: Path) -> None:
    """All that the tests need; each gets its name once it is whole."""
    with tempfile.TemporaryDirectory(dir=folder) as making:
        for target in NAMES:
            build_image(target, Path(making)).rename(folder / f"{target}.tar")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
