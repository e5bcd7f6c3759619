"""Kernels that came with the image are found, whatever folder they were compiled in, and compiled by nobody again.

Compiles for Hopper without a GPU: Triton brings NVIDIA's assembler.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")

pytestmark = pytest.mark.gpu

PROGRAM = """
import sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager


@triton.jit
def double(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, 2 * tl.load(x + at))


size = int(sys.argv[1])
source = ASTSource(double, {"x": "*fp32", "y": "*fp32", "SIZE": "constexpr"}, {"SIZE": size})
print(len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))
launcher = get_cache_manager("ab" * 32)
print(launcher.get_file("launcher.so") or launcher.put(b"machine code", "launcher.so"))
"""


def compile_double(tmp_path: Path, own: Path, prebuilt: Path | None, size: int = 64) -> list[str]:
    """In a process of its own: bytes of the compiled kernel, and where the launcher lies."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    variables = {"TRITON_CACHE_DIR": str(own), "PYTHONPATH": os.pathsep.join(sys.path)}
    variables["TRITON_CACHE_MANAGER"] = "mini_infer_engine.kernels.prebuilt_kernels:PrebuiltKernels"
    if prebuilt is not None:
        variables["MINI_INFER_PREBUILT_KERNELS"] = str(prebuilt)
    environment = {**os.environ, **variables}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(program), str(size)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_kernels_of_the_image_are_not_compiled_again(tmp_path: Path) -> None:
    built, image, own = tmp_path / "built", tmp_path / "image", tmp_path / "own"
    size, _ = compile_double(tmp_path, built, None)
    assert {"double.cubin", "__grp__double.json", "launcher.so"} <= files(built)
    built.rename(image)  # another path than that where they were compiled
    before = files(image)
    assert compile_double(tmp_path, own, image) == [size, str(next(image.rglob("launcher.so")))]
    assert files(own) == set()
    assert files(image) == before


def test_other_kernels_are_compiled_into_the_own_cache(tmp_path: Path) -> None:
    image, own = tmp_path / "image", tmp_path / "own"
    compile_double(tmp_path, image, None)
    before = sorted(image.rglob("*"))
    compile_double(tmp_path, own, image, size=128)
    assert "double.cubin" in files(own)
    assert sorted(image.rglob("*")) == before


@pytest.mark.parametrize("named", [None, "nothing-there"])
def test_tritons_own_cache_is_used_when_no_kernels_came_with_the_image(tmp_path: Path, named: str | None) -> None:
    compile_double(tmp_path, tmp_path / "own", None if named is None else tmp_path / named)
    assert {"double.cubin", "launcher.so"} <= files(tmp_path / "own")
    assert compile_double(tmp_path, tmp_path / "own", None)[1].startswith(str(tmp_path / "own"))
