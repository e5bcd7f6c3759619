"""The krew plugin: its manifest by krew's rules, its archive, and what its launcher runs."""

import hashlib
import re
import subprocess
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from scripts.krew_plugin import build

ROOT = Path(__file__).parents[1]
URI = "https://example.org/releases/v0.1.0/kubectl-infer.tar.gz"


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The folder that the script fills, from a file in place of a wheel."""
    wheel = tmp_path / "mini_infer-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    build(wheel, tmp_path / "dist", URI)
    return tmp_path / "dist"


def check(manifest: dict[str, Any]) -> None:
    """krew's rules: https://github.com/kubernetes-sigs/krew, internal/index/validation, and its developer guide."""
    assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
    assert manifest["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert manifest["kind"] == "Plugin"
    assert re.fullmatch(r"[\w-]+", manifest["metadata"]["name"])
    assert not manifest["metadata"]["name"].startswith("kube")
    spec = manifest["spec"]
    assert set(spec) <= {"version", "homepage", "shortDescription", "description", "caveats", "platforms"}
    assert re.fullmatch(r"v\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?", spec["version"])
    assert 0 < len(spec["shortDescription"]) <= 50
    assert "\n" not in spec["shortDescription"]
    assert spec["platforms"]
    for platform in spec["platforms"]:
        assert set(platform) <= {"selector", "uri", "sha256", "bin", "files"}
        assert set(platform["selector"]["matchLabels"]) <= {"os", "arch"}
        assert platform["uri"].startswith("https://")
        assert re.fullmatch(r"[0-9a-f]{64}", platform["sha256"])
        assert not PurePosixPath(platform["bin"]).is_absolute()
        assert ".." not in PurePosixPath(platform["bin"]).parts


def test_the_manifest_keeps_krews_rules_and_names_the_archives_hash(plugin: Path) -> None:
    manifest = yaml.safe_load((plugin / "infer.yaml").read_text())
    check(manifest)
    assert manifest["spec"]["version"] == "v0.1.0"
    digest = hashlib.sha256((plugin / "kubectl-infer.tar.gz").read_bytes()).hexdigest()
    platforms = manifest["spec"]["platforms"]
    assert {(p["uri"], p["sha256"]) for p in platforms} == {(URI, digest)}
    assert {tuple(p["selector"]["matchLabels"].values()) for p in platforms} == {
        *(("linux", arch) for arch in ("amd64", "arm64")),
        *(("darwin", arch) for arch in ("amd64", "arm64")),
    }
    with tarfile.open(plugin / "kubectl-infer.tar.gz") as tar:
        modes = {member.name: member.mode for member in tar}
    assert modes == {"LICENSE": 0o644, "kubectl-infer": 0o755, "mini_infer-0.1.0-py3-none-any.whl": 0o644}
    assert {p["bin"] for p in platforms} <= set(modes)


def test_the_same_wheel_gives_the_same_archive(tmp_path: Path, plugin: Path) -> None:
    build(tmp_path / "mini_infer-0.1.0-py3-none-any.whl", tmp_path / "again", URI)
    assert (tmp_path / "again/kubectl-infer.tar.gz").read_bytes() == (plugin / "kubectl-infer.tar.gz").read_bytes()


def test_another_file_is_refused_when_it_is_no_wheel_of_ours(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"other-1\.whl"):
        build(tmp_path / "other-1.whl", tmp_path, URI)


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def launch(plugin: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the launcher as krew links it, from another folder."""
    with tarfile.open(plugin / "kubectl-infer.tar.gz") as tar:
        tar.extractall(folder / "store", filter="data")
    link = folder / "bin" / "kubectl-infer"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to("../store/kubectl-infer")
    path = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "XDG_CACHE_HOME": "", **environment}
    return subprocess.run([link, "status", "-A"], capture_output=True, text=True, env=path, check=False, timeout=60)


def test_mini_infer_of_the_path_is_run_when_it_is_there(tmp_path: Path, plugin: Path) -> None:
    script(tmp_path / "bin/mini-infer", 'echo "run $*"')
    done = launch(plugin, tmp_path)
    assert (done.returncode, done.stdout) == (0, "run status -A\n")


def test_the_wheel_is_installed_once_when_nothing_is_on_the_path(tmp_path: Path, plugin: Path) -> None:
    inner = """case "$*" in
  *"-m pip install"*) echo "pip $*" >>"$LOG" ;;
  *) echo "run $*" ;;
esac"""
    fake = f"""case "$*" in
  "-c "*) exit 0 ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "{tmp_path}/inner" "$3/bin/python" ;;
esac"""
    script(tmp_path / "inner", inner)
    script(tmp_path / "fake-python", fake)
    environment = {"PYTHON": str(tmp_path / "fake-python"), "LOG": str(tmp_path / "log")}
    first = launch(plugin, tmp_path, **environment)
    assert (first.returncode, first.stdout) == (0, "run -m mini_infer_operator.cli status -A\n"), first.stderr
    again = subprocess.run(
        [tmp_path / "bin/kubectl-infer", "top"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), **environment},
        check=True,
    )
    assert again.stdout == "run -m mini_infer_operator.cli top\n"
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.endswith("mini_infer-0.1.0-py3-none-any.whl[operator]")


def test_the_remedy_is_named_when_no_python_is_new_enough(tmp_path: Path, plugin: Path) -> None:
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        script(tmp_path / "bin" / name, "exit 1")
    done = launch(plugin, tmp_path)
    assert done.returncode == 1
    assert "Python 3.11 to 3.13" in done.stderr
