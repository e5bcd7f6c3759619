"""What images are built from: every package pinned and hashed, and a bill of materials of what is there."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(path: str) -> dict[str, str]:
    found = re.findall(r"(?m)^([A-Za-z0-9][-A-Za-z0-9._]*)==([^\s;]+)", (ROOT / path).read_text())
    return {name.lower(): version for name, version in found}


@pytest.mark.parametrize(
    ("path", "extras", "chosen_elsewhere"),
    [
        ("constraints-control-plane.txt", ("gateway", "operator"), set()),
        ("constraints-engine.txt", ("engine", "disaggregated"), {"torch"}),
    ],
)
def test_every_package_of_an_image_has_hashes(path: str, extras: tuple[str, ...], chosen_elsewhere: set[str]) -> None:
    entries = re.split(r"(?m)^(?=[A-Za-z0-9])", (ROOT / path).read_text())[1:]
    assert all("--hash=sha256:" in entry for entry in entries)
    locked, everywhere = pins(path), pins("constraints.txt")
    assert locked.items() <= everywhere.items(), f"{path} is older than constraints.txt: make lock"
    requested = [
        *PROJECT["dependencies"],
        *(item for extra in extras for item in PROJECT["optional-dependencies"][extra]),
    ]
    names = {re.split(r"[<>=;\[ ]", item)[0].lower() for item in requested}
    assert names - set(locked) == chosen_elsewhere
    assert not [name for name in locked if name.startswith(("nvidia-", "cuda-", "triton"))]


def test_images_install_by_hashes_from_a_base_that_can_be_named_by_digest() -> None:
    steps = (ROOT / "Dockerfile").read_text()
    for path in ("constraints-control-plane.txt", "constraints-engine.txt"):
        assert f"--no-deps --require-hashes -r /build/{path}" in steps
    bases = re.findall(r"(?m)^FROM (\S+)", steps)
    assert {base for base in bases if "$" in base} == {"${PYTHON_BASE}", "${CUDA_BASE}", "${CONSOLE_BASE}"}
    assert not [base for base in bases if ":" in base]


def test_a_bill_of_materials_names_what_is_installed(tmp_path: Path) -> None:
    output = tmp_path / "sbom.json"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "sbom.py"), str(output)], check=True)
    document = json.loads(output.read_text())
    assert document["bomFormat"] == "CycloneDX"
    assert "pkg:pypi/pydantic" in {component["purl"].partition("@")[0] for component in document["components"]}
