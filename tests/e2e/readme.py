"""Types README's commands for a cluster, line by line, on a node that the program in E2E_NODE makes.

    E2E_NODE=... E2E_BUILD=... python -m tests.e2e.readme

The lines of docker and kind are left out: their images are on the node already, under the names that these lines would
give them. All others run in bash as they stand. Then the question of README's first section reaches the cluster, and
the commands in the text below run too.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.cluster import NodeCluster, wait_until
from tests.e2e.commands import ROOT, log_line
from tests.e2e.images import NAMES, TAG, build_image, repository
from tests.e2e.questions import ANSWER
from tests.e2e.soak import is_ready

VERSION = "0.1.0"
ELSEWHERE = ("for target in ", "kind load ")
"""The beginnings of lines whose work the node's program does."""
IN_TEXT = (
    "kubectl get infsvc",
    "kubectl scale infsvc/demo --replicas=3",
    ".venv/bin/mini-infer plan -f examples/hub.yaml",
)


def commands(readme: str) -> list[str]:
    """Returns the lines of the first block of README's section about clusters."""
    section = readme.split("\n## On a cluster\n")[1].split("\n## ")[0]
    block = section.split("\n```\n")[1]
    for command in IN_TEXT:
        assert f"`{command}`" in section, f"README has no {command}"
    return [line for line in block.splitlines() if line]


def question(readme: str) -> str:
    """Returns README's first curl command."""
    found = re.search(r"^```\n(curl .*?)\n```$", readme, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


class Shell:
    """Bash in the checkout, with the cluster's kubeconfig."""

    def __init__(self, cluster: NodeCluster) -> None:
        path = f"{os.environ.get('KUBEBUILDER_ASSETS', '')}:{os.environ['PATH']}"
        self._environment = {**os.environ, **cluster.environment, "PATH": path}
        self._behind: list[subprocess.Popen[bytes]] = []

    def type(self, line: str) -> str:
        """Runs a line to its end and returns what it printed."""
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=300
        )
        log_line(f"$ {line}\n{done.stdout[-600:]}{done.stderr[-600:]}")
        assert done.returncode == 0, f"{line} ended with {done.returncode}"
        return done.stdout

    def type_and_leave(self, line: str) -> None:
        """Starts a line that runs until the end."""
        log_line(f"$ {line}")
        self._behind.append(
            subprocess.Popen(["bash", "-c", line], cwd=ROOT, env=self._environment, start_new_session=True)
        )

    def close(self) -> None:
        """Ends what was left running."""
        for process in self._behind:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(10)


def follow(cluster: NodeCluster) -> None:
    """Runs all of it. Raises AssertionError or TimeoutError where README does not hold."""
    readme = (ROOT / "README.md").read_text()
    shell = Shell(cluster)
    try:
        for line in commands(readme):
            if line.startswith(ELSEWHERE):
                log_line(f"(left out) {line}")
            elif "port-forward" in line:
                shell.type_and_leave(line)
            else:
                shell.type(line)
        asked = question(readme)
        answer = wait_until("an answer", lambda: _answered(shell, asked), 60)
        assert ANSWER in answer.replace("\\n", "\n"), answer
        for line in IN_TEXT:
            shell.type(line)

        def engines() -> int:
            return sum(map(is_ready, cluster.read("Pod", "default", labels="serving.mini-infer.io/service=demo")))

        wait_until("three engines", lambda: engines() == 3, 120)
        shell.type("kubectl get infsvc")
    finally:
        shell.close()


def _answered(shell: Shell, line: str) -> str:
    try:
        return shell.type(line)
    except AssertionError:  # the port is forwarded a moment later
        return ""


def main() -> int:
    """Makes the node, gives it the images by README's names, follows README, and removes the node."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="mini-infer-readme-") as folder:
        cluster = NodeCluster(os.environ["E2E_NODE"], Path(folder) / "node")
        try:
            for target in NAMES:
                cluster.load(build_image(target, Path(folder)))
                cluster.tag(f"{repository(target)}:{TAG}", f"docker.io/library/mini-infer-{target}:{VERSION}")
            follow(cluster)
        except Exception:
            cluster.explain("mini-infer-system", "default")
            raise
        finally:
            cluster.down()
    log_line("README's commands for a cluster hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
