"""Which torch a machine gets: the measured pair where there is an NVIDIA driver, else a build for CPUs."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PINNED = dict(
    line.split("==") for line in (ROOT / "constraints-gpu.txt").read_text().splitlines() if not line.startswith("#")
)


def pip_arguments(tmp_path: Path, *, with_driver: bool) -> list[str]:
    """What is installed for a Python without torch, by a stand-in that writes down what it is called with."""
    requested = tmp_path / "asked"
    commands = {
        "python": f'[ "$1" = - ] && exit 1; echo "$@" >>{requested}',
        "nvidia-smi": f"exit {int(not with_driver)}",
    }
    for name, script in commands.items():
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
    subprocess.run(
        ["bash", "scripts/install_torch.sh", str(tmp_path / "python"), "constraints.txt"],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
        timeout=30,
    )
    return requested.read_text().split()


def test_the_pinned_torch_and_triton_are_installed_when_there_is_a_driver(tmp_path: Path) -> None:
    assert pip_arguments(tmp_path, with_driver=True) == [
        *("-m", "pip", "install"),
        f"torch=={PINNED['torch']}",
        f"triton=={PINNED['triton']}",
    ]


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="this machine has an NVIDIA driver")
def test_the_cpu_build_of_torch_is_installed_when_there_is_no_driver(tmp_path: Path) -> None:
    assert pip_arguments(tmp_path, with_driver=False)[-1].endswith("+cpu")


def test_our_kernels_for_hopper_know_the_pinned_triton() -> None:
    device = pytest.importorskip("mini_infer_engine.kernels.device", reason="needs torch")
    pinned = device.DeviceProfile("NVIDIA H200", (9, 0), 132, 227 << 10, 228 << 10, PINNED["triton"])
    assert pinned.gluon_obstacle is None
