import subprocess
import sys
import threading

import pytest

from mini_infer_engine.config.child_start import start_child

CHILD = """
import ctypes, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
print("ready", flush=True)
sys.stdin.read()
print("told to leave", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux'")
def test_a_child_process_survives_when_its_starting_thread_ends() -> None:
    children: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        child = start_child([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        children.append(child)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    output, _ = children[0].communicate(b"", timeout=60)
    assert (output, children[0].returncode) == (b"told to leave\n", 0)


def test_the_starting_thread_gets_the_error_when_a_child_cannot_start() -> None:
    output: list[BaseException] = []

    def start() -> None:
        try:
            start_child(["/no/such/program"])
        except OSError as error:
            output.append(error)

    for _ in range(2):
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    assert [type(error) for error in output] == [FileNotFoundError] * 2
