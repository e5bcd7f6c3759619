"""An environment for each suite, in `.conformance/` of the checkout: newest packages, never those of the project.

It knows how packages are installed (uv, npm), not what the suites do with them.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".conformance"
DEMO_MODEL = ROOT / "engine" / "mini_infer_engine" / "assets" / "demo"


def python_environment(name: str) -> Path:
    """The interpreter of the environment `name`, which is made where it is missing; remove the folder to renew it."""
    home = FOLDER / "python" / name
    python = home / "bin" / "python"
    packages = _packages("python", name)
    if _is_ready(home, packages):
        return python
    subprocess.run([_uv(), "venv", "--quiet", "--clear", "--python", sys.executable, home], check=True)
    subprocess.run([_uv(), "pip", "install", "--quiet", "--upgrade", "--python", python, *packages], check=True)
    _mark_ready(home, packages)
    return python


def node_environment(name: str) -> Path:
    """A folder whose node_modules hold the packages of `name`."""
    home = FOLDER / "node" / name
    packages = _packages("node", name)
    if not _is_ready(home, packages):
        home.mkdir(parents=True, exist_ok=True)
        quiet = ["--silent", "--no-audit", "--no-fund"]
        command = [node().with_name("npm"), "install", *quiet, "--prefix", home, *packages]
        environment = os.environ | {"PATH": f"{node().parent}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run(command, check=True, env=environment)
        _mark_ready(home, packages)
    return home


def node() -> Path:
    """A Node.js of our own, newest of PyPI: with an older one npm quietly installs older packages."""
    return python_environment("node").with_name("node")


def source_package(requirement: str) -> Path:
    """The unpacked source package of PyPI, as `vllm==0.26.0`: only fetched, nothing of it is built or run."""
    name = requirement.replace("==", "-")
    target = FOLDER / "sources" / name
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        fetch = [_uv(), "tool", "run", "unearth", requirement, "--no-binary", "--download", target.parent]
        subprocess.run(fetch, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(f"{target}.tar.gz") as archive:
            archive.extractall(target.parent, filter="data")
        Path(f"{target}.tar.gz").unlink()
    return target


def versions(name: str) -> dict[str, str]:
    """Installed versions of the packages that `name` asks for, for the result's heading."""
    code = "import sys; from importlib.metadata import version; print('\\n'.join(version(n) for n in sys.argv[1:]))"
    names = [package.partition("[")[0].partition("=")[0] for package in _packages("python", name)]
    command = [str(python_environment(name)), "-c", code, *names]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(zip(names, out.split(), strict=True))


def _packages(kind: str, name: str) -> list[str]:
    packages: list[str] = tomllib.loads((HERE / "environments.toml").read_text())[kind][name]
    return packages


def _is_ready(home: Path, packages: list[str]) -> bool:
    stamp = home / "installed"
    return stamp.exists() and stamp.read_text() == "\n".join(packages)


def _mark_ready(home: Path, packages: list[str]) -> None:
    (home / "installed").write_text("\n".join(packages))


def _uv() -> str:
    """The uv on the PATH, else one of our own: it shares one cache between all environments."""
    found = shutil.which("uv")
    own = FOLDER / "uv" / "bin" / "uv"
    if found is None and not own.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER / "uv"], check=True)
        subprocess.run([FOLDER / "uv" / "bin" / "pip", "install", "--quiet", "uv"], check=True)
    return found or str(own)


def clean_environment(**changes: str) -> dict[str, str]:
    """The process environment without what would reach the project's own packages or a service outside."""
    private = ("PYTHONPATH", "VIRTUAL_ENV", "OPENAI_", "ANTHROPIC_", "CLAUDE", "CODEX")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(private)}
    offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    return kept | offline | {"NO_PROXY": "127.0.0.1,localhost"} | changes
