"""Certificates of a CA of the tests' own, made with openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")


def make_ca(folder: Path, name: str = "ca") -> Path:
    """The CA's certificate; its key lies beside it as NAME.key."""
    folder.mkdir(exist_ok=True)
    _openssl(folder, "req", "-x509", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    return folder / f"{name}.pem"


def make_certificate(folder: Path, name: str, ca: str = "ca", host: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """A certificate for `host` and its key."""
    files = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
    names = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={host}")
    _openssl(folder, "req", "-x509", *_KEY, *files, *names, "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key")
    return folder / f"{name}.pem", folder / f"{name}.key"


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
