"""Wraps programmatic dependent launch (CUDA C++ Programming Guide) for Gluon kernels.

Such kernels begin while the kernel before them still runs. `pdl_gemm` explains why that is safe.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def launch_dependents():
    """Emits PTX griddepcontrol.launch_dependents: the stream's next kernel, if launched with PDL, may take free SMs."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def grid_dependency_wait():
    """Emits PTX griddepcontrol.wait, which waits until the kernel before has ended and its writes are visible."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
