"""Names the distribution's extra that brings packages which a command misses. Imports nothing heavy."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

WHEEL = "mini_infer-VERSION-py3-none-any.whl"


def install_hint(extra: str) -> str:
    """Returns the command that installs an extra. The name mini-infer on PyPI belongs to another project, so it is not
    used.
    """
    return f"pip install '.[{extra}]' in a checkout, or pip install '{WHEEL}[{extra}]' with the wheel"


@contextmanager
def missing_packages_name_the_extra(command: str, extra: str) -> Iterator[None]:
    """Ends the process with one sentence if an import in the body, or in what it calls, misses a package."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or str(error)).split(".", 1)[0]
        if package.startswith("mini_infer_") and "." in (error.name or ""):
            raise  # a module of our own: that is a fault of ours
        print(f"{command}: the package {package} is not installed: {install_hint(extra)}", file=sys.stderr)
        sys.exit(1)
