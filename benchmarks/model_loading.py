"""Reads of a checkpoint by safetensors, runai-model-streamer and fastsafetensors; copies out of a bucket on loopback.

    python benchmarks/model_loading.py --folder /mnt/disk --gib 4 --repeats 3 --out FILE

Each read is a process of its own. "cold": the kernel has dropped the files' pages (posix_fadvise); "warm": they were
read just before. Every byte becomes part of a tensor on --device. Loaders that are not installed are left out: only
safetensors is a dependency, `pip install runai-model-streamer fastsafetensors` adds the others. Copies are those of
`mini-infer fetch s3://`, with as many ranges at once as it uses, and with one.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from common.report import log_line, make_parser, print_table, save, words

ROOT = Path(__file__).parents[1]
SHARDS = 4
LOADERS = {"safetensors": "safetensors", "runai": "runai_model_streamer", "fastsafetensors": "fastsafetensors"}
_READ = """
import json, sys, time
from pathlib import Path
import torch
loader, device, *files = sys.argv[1:]
torch.zeros(1, device=device)
total = 0
if loader == "safetensors":
    from safetensors import safe_open
    begun = time.perf_counter()
    for file in files:
        with safe_open(file, "pt", device=device) as opened:
            total += sum(opened.get_tensor(name).clone().nbytes for name in opened.keys())
elif loader == "runai":
    from runai_model_streamer import SafetensorsStreamer
    begun = time.perf_counter()
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        total = sum(tensor.to(device).nbytes for _, tensor in streamer.get_tensors())
else:
    from fastsafetensors import fastsafe_open
    begun = time.perf_counter()
    with fastsafe_open(files, device=device, nogds=True) as opened:
        total = sum(opened.get_tensor(name).clone().nbytes for name in opened.keys())
if device != "cpu":
    torch.cuda.synchronize()
print(json.dumps({"seconds": time.perf_counter() - begun, "bytes": total}))
"""


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary folder)")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--loaders", type=words, default=tuple(LOADERS), metavar="NAME,...")
    options = parser.parse_args()
    loaders = [name for name in options.loaders if importlib.util.find_spec(LOADERS[name]) is not None]
    size = 1 << 22 if options.smoke else int(options.gib * (1 << 30))
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        files = _checkpoint(Path(root) / "bucket" / "model", size)
        reads: dict[str, list[float]] = {}
        for _ in range(1 if options.smoke else options.repeats):
            for state in ("cold", "warm"):
                for name in loaders:
                    reads.setdefault(f"{name}, {state}", []).append(_read(name, state, options.device, files))
        copies = _copies(Path(root), 1 if options.smoke else options.repeats)
    base = {state: median(reads[f"safetensors, {state}"]) for state in ("cold", "warm")}
    rows = [
        [name, f"{median(found):.2f}", f"{median(found) / base[name.rpartition(', ')[2]]:.2f}"]
        for name, found in reads.items()
    ]
    print_table(["loader", "GB/s, median", "of safetensors'"], rows)
    rows = [[name, f"{median(found):.2f}"] for name, found in copies.items()]
    print_table(["copy from a bucket", "GB/s, median"], rows)
    versions = {name: _version(LOADERS[name]) for name in loaders}
    shape = {"bytes": size, "shards": SHARDS, "device": options.device, "folder": str(options.folder or "")}
    save(options.out, {"reads": reads, "copies": copies, "versions": versions, "checkpoint": shape})
    return 0


def _checkpoint(folder: Path, size: int) -> list[str]:
    """Writes shards of random tensors, and returns their paths."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    tensors = 16
    files = [folder / f"model-{number}.safetensors" for number in range(SHARDS)]
    for shard, file in enumerate(files):
        shape = (tensors, size // SHARDS // tensors // 2)
        values = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
        save_file({f"layers.{shard}.{number}.weight": row.clone() for number, row in enumerate(values)}, file)
    return [str(file) for file in files]


def _read(loader: str, state: str, device: str, files: list[str]) -> float:
    """Returns the GB/s at which a new process reads the files."""
    for file in files:
        _drop(file) if state == "cold" else Path(file).read_bytes()
    done = subprocess.run([sys.executable, "-c", _READ, loader, device, *files], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{loader} failed: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    log_line(f"{loader}, {state}: {found['seconds']:.2f} s")
    return float(found["bytes"] / found["seconds"] / 1e9)


def _drop(file: str) -> None:
    """Has the kernel forget a file's pages, which needs no rights."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _copies(root: Path, repeats: int) -> dict[str, list[float]]:
    """Returns the GB/s of copies from a server on loopback, hashing and writing included, by ranges at once."""
    sys.path.insert(0, str(ROOT))
    from mini_infer_engine.tools.fetch import object_store
    from mini_infer_engine.tools.fetch.fill import fill
    from tests.support.object_server import object_server

    found: dict[str, list[float]] = {}
    with object_server(root) as server:
        os.environ.update(server.environment)
        for number in range(repeats):
            for parts in (1, object_store.PARTS_IN_FLIGHT):
                object_store.PARTS_IN_FLIGHT, before = parts, object_store.PARTS_IN_FLIGHT
                source, begun_s = object_store.ObjectStoreSource("s3://bucket/model"), time.perf_counter()
                target = root / f"copy-{number}-{parts}"
                manifest = fill(target, "s3://bucket/model", source, lambda *_: None)
                taken_s = time.perf_counter() - begun_s
                object_store.PARTS_IN_FLIGHT = before
                found.setdefault(f"{parts} ranges at once", []).append(manifest.total_bytes / taken_s / 1e9)
                for file in target.iterdir():
                    file.unlink()
    return found


def _version(module: str) -> str:
    from importlib.metadata import version

    return version(module.replace("_", "-"))


if __name__ == "__main__":
    raise SystemExit(main())
