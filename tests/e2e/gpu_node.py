"""A node of our own with GPUs: the cluster from E2E_NODE, the engine's image, operator and gateway as processes.

Only engines get the machine's GPUs and, with E2E_GPU_BUILD, its Python: so the two others run inside the node's network
from the Python that runs the tests, with the same flags as in the chart.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.cluster import NodeCluster
from tests.e2e.commands import ROOT, log_line, run
from tests.support.checkout import LIBRARIES, python_path

NODE_ADDRESS = os.environ.get("E2E_NODE_ADDRESS", "10.77.0.1")
PORT = 8088
NAME = "mini-infer-engine-cuda:e2e"
APP_PATH = "/app/bin"
"""Where tests/e2e/host_image.sh puts the engine's command."""


class GpuNode(NodeCluster):
    """Made by `up`; its gateway is at `url`."""

    def __init__(self, node: str, folder: Path, gpus: str) -> None:
        super().__init__(node, folder / "node", "--gpus", gpus)
        self._program, self._scratch = node, folder
        self.cache = folder / "cache"
        self.models = folder / "models"
        for shared in (self.cache, self.models):  # engines are another user than we are
            shared.mkdir()
            shared.chmod(0o777)
        folder.chmod(0o755)
        address = self._internal_address() if NODE_ADDRESS == "auto" else NODE_ADDRESS
        self.url = f"http://{address}:{PORT}"

    def _internal_address(self) -> str:
        (node,) = self.get("nodes")
        return next(str(a["address"]) for a in node["status"]["addresses"] if a["type"] == "InternalIP")

    def allocatable(self) -> int:
        (node,) = self.get("nodes")
        return int(node["status"]["allocatable"].get("nvidia.com/gpu", 0))

    def load_engine(self) -> None:
        """Build the engine's image with E2E_GPU_BUILD, else E2E_BUILD, and give it to the node."""
        builder = os.environ.get("E2E_GPU_BUILD") or os.environ["E2E_BUILD"]
        target, archive = os.environ.get("E2E_GPU_TARGET", "engine-cuda"), self._scratch / "engine.tar"
        run(builder, ROOT, NAME, archive, "--target", target, timeout_s=1800)
        self.load(archive)
        archive.unlink()
        log_line(f"the engine's image ({target}) is on the node")

    @contextlib.contextmanager
    def control_plane(self) -> Iterator[None]:
        """Operator and gateway, until the end."""
        self.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        image = f"localhost/{NAME}"
        operator = ["mini_infer_operator.controller.run", "--engine-image=none", f"--engine-cuda-image={image}"]
        operator += ["--engine-image-pull-policy=Never", f"--gateway-url={self.url}", "--pod-security=privileged"]
        gateway = [
            "mini_infer_gateway",
            "--host=0.0.0.0",
            f"--port={PORT}",
            "--kubernetes",
            "--max-local-prefill-tokens=256",
        ]
        with self._inside("operator", *operator), self._inside("gateway", *gateway):
            yield

    @contextlib.contextmanager
    def _inside(self, name: str, module: str, *flags: str) -> Iterator[None]:
        variables = {
            "KUBECONFIG": str(self._scratch / "node/kubeconfig"),
            "PYTHONPATH": os.pathsep.join([python_path(parts=(*LIBRARIES, "gateway", "operator")), *sys.path]),
        }
        command = [self._program, "exec", str(self._scratch / "node"), "env"]
        command += [f"{key}={value}" for key, value in variables.items()]
        log = self._scratch / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, sys.executable, "-m", module, *flags], stdout=output, stderr=output, start_new_session=True
            )
        try:
            yield
        except BaseException:
            print(f"--- {name}\n{log.read_text()[-4000:]}")
            raise
        finally:
            os.killpg(process.pid, 15)
            process.wait(30)

    def service(self, file: str, **changes: Any) -> dict[str, Any]:
        """An example, with what only this node needs: our folders, a user by number, and where the command is.

        `changes` are fields of each of its roles. E2E_GPU_KV_CACHE sizes the KV cache of engines that share a GPU.
        """
        service: dict[str, Any] = yaml.safe_load((ROOT / "examples" / file).read_text())
        python = Path(sys.executable).parent
        path = f"{APP_PATH}:{python}:/opt/mini-infer/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin"
        folders = {"cache": self.cache, "models": self.models}
        template = {
            "spec": {
                "securityContext": {"runAsUser": 65532, "runAsGroup": 65532},
                "volumes": [{"name": n, "hostPath": {"path": str(f), "type": "Directory"}} for n, f in folders.items()],
            },
            "container": {
                "env": [{"name": "PATH", "value": path}, {"name": "TRITON_CACHE_DIR", "value": "/cache/triton"}],
                "volumeMounts": [{"name": n, "mountPath": f"/{n}"} for n in folders],
            },
        }
        requests = {"cpu": "250m", "memory": "1Gi"}  # two fit on a small node
        for role in {"unified", "prefill", "decode"} & service["spec"].keys():
            spec = service["spec"][role] | {"template": template} | changes
            spec["resources"] = {**spec.get("resources", {}), "requests": requests}
            if kv_cache := os.environ.get("E2E_GPU_KV_CACHE"):
                spec["engine"] = {**spec.get("engine", {}), "kvCacheMemory": kv_cache}
                spec["engine"].pop("gpuMemoryUtilization", None)
            service["spec"][role] = spec
        return service
