"""The script that adds compiled kernels to an image, with a stand-in for docker whose containers have no GPU."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCKER = """#!/usr/bin/env python3
import pathlib, subprocess, sys
command, *arguments = sys.argv[1:]
folder = pathlib.Path(__file__).parent
(folder / command).write_text("\\n".join(arguments))
if command == "run":
    kernels = pathlib.Path(arguments[arguments.index("--volume") + 1].split(":")[0])
    for name in {names}:
        (kernels / "KEY").mkdir(exist_ok=True)
        (kernels / "KEY" / name).write_text(name)
    script = arguments.index("-c")
    sys.exit({run})
built = pathlib.Path(arguments[-1])
(folder / "layer").write_text((built / "Dockerfile").read_text() + (built / "kernels/KEY/gemm.cubin").read_text())
"""
SERVE = """#!/usr/bin/env python3
import http.server, pathlib, sys
folder = pathlib.Path(__file__).parent
(folder / "served").write_text(" ".join(sys.argv[1:]))
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()
if "broken" in sys.argv:
    sys.exit("no such model")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Ready).serve_forever()
"""
IN_CONTAINER = "subprocess.run([sys.executable, *arguments[script:]]).returncode"


def prebuild(
    tmp_path: Path, *arguments: str, names: tuple[str, ...] = ("gemm.cubin",)
) -> subprocess.CompletedProcess[str]:
    stand_ins = {"docker": DOCKER.format(names=names, run=IN_CONTAINER), "mini-infer-serve": SERVE}
    for name, program in stand_ins.items():
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    return subprocess.run(
        [ROOT / "scripts/prebuild_kernels.sh", *arguments],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LIMIT_S": "60"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_what_an_engine_compiles_until_it_is_ready_becomes_a_layer(tmp_path: Path) -> None:
    done = prebuild(tmp_path, "engine:1", "engine:1-demo", "demo", "--dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "served").read_text().startswith("demo --dtype=bfloat16 ")
    assert (tmp_path / "layer").read_text() == "FROM engine:1\nCOPY kernels /opt/mini-infer/kernels\ngemm.cubin"
    assert "engine:1-demo" in (tmp_path / "build").read_text().split()
    assert "engine:1-demo has 1 more kernels" in done.stdout


@pytest.mark.parametrize(
    ("model", "names", "message"),
    [
        ("demo", (), "nothing was compiled: engine:1 has the kernels of this model, or ran without a GPU"),
        ("broken", ("gemm.cubin",), "engine:1 did not start with broken"),
    ],
)
def test_no_image_is_made_where_nothing_was_compiled(
    tmp_path: Path, model: str, names: tuple[str, ...], message: str
) -> None:
    done = prebuild(tmp_path, "engine:1", "engine:1-demo", model, names=names)
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tmp_path / "build").exists()


def test_the_image_for_gpus_looks_for_kernels_where_the_script_puts_them() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "MINI_INFER_PREBUILT_KERNELS=/opt/mini-infer/kernels" in dockerfile
    assert "TRITON_CACHE_MANAGER=mini_infer_engine.kernels.prebuilt_kernels:PrebuiltKernels" in dockerfile
    assert "class PrebuiltKernels" in (ROOT / "engine/mini_infer_engine/kernels/prebuilt_kernels.py").read_text()
