"""Programmatic dependent launch (CUDA C++ Programming Guide) for Gluon kernels, which begin while the kernel before
them still runs. `pdl_gemm` says why that is safe.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def launch_dependents():
    """PTX griddepcontrol.launch_dependents: the next kernel of the stream, if launched with PDL, may take free SMs."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def grid_dependency_wait():
    """PTX griddepcontrol.wait: until the kernel before this one has ended and what it wrote can be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
