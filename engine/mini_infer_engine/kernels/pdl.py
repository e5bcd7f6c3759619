"""For Gluon kernels that begin while the kernel before them still runs: programmatic dependent launch of the CUDA C++
Programming Guide. `pdl_gemm` says why it is safe.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def launch_dependents():
    """The kernel after this one, if it is launched ahead, may take the room that is free."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def grid_dependency_wait():
    """Until the kernel before this one has ended and what it wrote can be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
