"""Our kernels of gated delta nets beside those of flash-linear-attention (fla-core), at Qwen3-Next's shape on one GPU.

    python benchmarks/recurrent_kernels.py --out FILE [--fla FLA_CORE.whl,EINOPS.whl] [--sweep]

One token for each of several sequences, and prompts of one sequence: microseconds inside a CUDA graph, over as many
copies as do not fit the L2 cache. Both begin after the convolution, and normalise keys and queries, decays and
strengths in their kernels. Ours also normalise and gate the output, and find states in slots; fla's get states that
are gathered already, and write new ones. `--fla` names wheels that are not installed; without fla-core ours are timed
alone. fla's kernels choose among many configs at their first call: several processes compile them at the same time.
`--sweep` times ours with other configs, too, from which gated_delta_config.py was made.
"""

import gc
import importlib
import math
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from common.report import integers, log_line, make_parser, print_table, save, words
from common.timing import graph_microseconds
from triton.runtime.autotuner import Autotuner

from mini_infer_engine.core.batch import Row
from mini_infer_engine.kernels.policy import kernel_policy
from mini_infer_engine.kernels.recurrence.gated_delta_config import ScanConfig, StepConfig, scan_config, step_config
from mini_infer_engine.kernels.recurrence.gated_delta_prepare import prepare_gated_delta
from mini_infer_engine.kernels.recurrence.gated_delta_scan import gated_delta_scan
from mini_infer_engine.kernels.recurrence.gated_delta_step import gated_delta_step
from mini_infer_engine.kernels.recurrence.pass_tables import PassTables
from mini_infer_engine.kernels.workspace import Workspace
from mini_infer_engine.models.state_spec import StateSpec
from mini_infer_engine.runtime.memory.state_pool import StatePool
from mini_infer_engine.runtime.memory.state_slots import StateSlots
from mini_infer_engine.runtime.recurrent.pass_tables import blank_steps, decode_tables, pass_tables

KEY_HEADS, HEADS, DIM, EPS = 16, 32, 128, 1e-6
KEY_WIDTH, WIDTH = KEY_HEADS * DIM, HEADS * DIM
CHANNELS = 2 * KEY_WIDTH + WIDTH
BATCHES, PROMPTS = (1, 8, 32, 128), (512, 4_096, 16_384)
STEP_CONFIGS = [
    StepConfig(values, warps, programs, pdl=pdl)
    for values, warps, programs in (
        (8, 1, 64),
        (16, 1, 64),
        (16, 1, 1024),
        (32, 1, 64),
        (32, 1, 1024),
        (32, 4, 64),
        (64, 1, 64),
        (64, 4, 64),
        (128, 8, 64),
    )
    for pdl in (False, True)
]
SCAN_CONFIGS = [
    ScanConfig(*sizes) for sizes in ((16, 4, 2), (16, 4, 3), (32, 4, 2), (32, 4, 3), (32, 8, 3), (64, 8, 2))
]
_ALL_BYTES = 256 << 20
"""Bytes of all copies of a pass: four times the L2 cache of an H200."""
_STATE_BYTES = HEADS * DIM * DIM * 4
DEVICE = torch.device("cuda")


class Inputs:
    """The inputs of one pass, in bf16, and the states of its sequences in slots of their own."""

    def __init__(self, batch: int, tokens: int) -> None:
        """Makes inputs of `tokens` tokens for each of `batch` sequences."""

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, dtype=torch.bfloat16, device=DEVICE)

        self.batch, self.tokens, count = batch, tokens, batch * tokens
        self.mixed, self.gates = random(count, CHANNELS), random(count, WIDTH)
        strengths, decays = random(count, 2 * HEADS).split(HEADS, dim=1)
        a_log, dt_bias = torch.rand((2, HEADS), dtype=torch.float32, device=DEVICE).unbind()
        self.weights = strengths, decays, a_log, dt_bias
        self.norm_weight = torch.rand(DIM, dtype=torch.bfloat16, device=DEVICE)
        spec = StateSpec(1, CHANNELS, 3, (HEADS, DIM, DIM), torch.bfloat16)
        self.pool = StatePool(spec, StateSlots(spec.slot_bytes, batch, 0), DEVICE)
        self.states = self.pool.states[:, 0]
        self.states.normal_()

    def for_fla(self) -> dict[str, Any]:
        """Returns the same inputs as fla's functions take them, dense."""
        strengths, decays, a_log, dt_bias = self.weights
        q, k, v = (part.contiguous() for part in self.mixed.split([KEY_WIDTH, KEY_WIDTH, WIDTH], dim=1))
        sizes = (self.batch, self.tokens)
        return {
            "q": q.view(*sizes, KEY_HEADS, DIM),
            "k": k.view(*sizes, KEY_HEADS, DIM),
            "v": v.view(*sizes, HEADS, DIM),
            "g": decays.contiguous().view(*sizes, HEADS),
            "beta": strengths.contiguous().view(*sizes, HEADS),
            "A_log": a_log,
            "dt_bias": dt_bias,
            "initial_state": self.states.contiguous().clone(),
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "output_final_state": True,
        }

    def finished(self, out: torch.Tensor) -> torch.Tensor:
        """Normalises and gates an output of fla's, as our kernels do."""
        heads = out.reshape(-1, HEADS, DIM).float()
        normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + EPS) * self.norm_weight.float()
        return normed.flatten(1) * torch.nn.functional.silu(self.gates.float())


def step(inputs: Inputs, tables: PassTables, workspace: Workspace, config: StepConfig) -> torch.Tensor:
    """Computes one token of each sequence by our kernel."""
    out = torch.empty_like(inputs.gates)
    rest = (*inputs.weights, inputs.norm_weight, EPS, inputs.states, tables, out)
    gated_delta_step(inputs.mixed, inputs.gates, *rest, config, workspace)
    return out


def scan(inputs: Inputs, tables: PassTables, config: ScanConfig) -> torch.Tensor:
    """Computes the tokens of one sequence by our kernels."""
    q, k, _ = torch.split(inputs.mixed, [KEY_WIDTH, KEY_WIDTH, WIDTH], dim=1)
    out = torch.empty_like(inputs.gates)
    prepared = prepare_gated_delta(inputs.mixed, *inputs.weights, DIM, DIM, tables)
    gated_delta_scan(q, k, prepared, inputs.gates, inputs.norm_weight, EPS, inputs.states, tables, out, config)
    return out


def our_call(inputs: Inputs, workspace: Workspace, config: Any = None) -> Callable[[], torch.Tensor]:
    """Returns our pass over the inputs, whose tables are laid out, with the engine's config if none is given."""
    if inputs.tokens == 1:
        slots = torch.arange(inputs.batch, dtype=torch.int32, device=DEVICE)
        tables = decode_tables(slots, blank_steps(inputs.batch, DEVICE), inputs.batch)
        chosen = config or step_config(inputs.batch, HEADS, pdl=kernel_policy(DEVICE).pdl)
        return partial(step, inputs, tables, workspace, chosen)
    row = Row(0, 16, inputs.tokens, [0] * inputs.tokens, [], None)
    tables = pass_tables([row], inputs.pool, DEVICE)
    return partial(scan, inputs, tables, config or scan_config(torch.bfloat16))


def fla_functions(wheels: list[str], folder: str) -> tuple[Any, Any] | None:
    """Returns fla's functions for one token and for prompts, or None if fla-core is not there.

    Wheels are unpacked into `folder`: Triton compiles kernels from their files.
    """
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(folder)
    sys.path.append(folder)
    try:
        module = importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError as error:
        log_line(f"fla-core cannot be imported: {error}")
        return None
    return module.fused_recurrent_gated_delta_rule, module.chunk_gated_delta_rule


def compile_part(functions: tuple[Any, Any], part: int, parts: int) -> None:
    """Calls fla's functions once, whose kernels have a share of their configs, and ours with a share of theirs."""
    workspace = Workspace(DEVICE)
    for tokens, configs in ((1, STEP_CONFIGS), (PROMPTS[0], SCAN_CONFIGS)):
        for config in configs[part::parts]:
            our_call(Inputs(1, tokens), workspace, config)()
    for kernel in gc.get_objects():
        if type(kernel).__mro__.count(Autotuner):
            kernel.configs = kernel.configs[part % len(kernel.configs) :: parts]
    for tokens, function in zip((1, PROMPTS[0]), functions, strict=True):
        function(**Inputs(1, tokens).for_fla())
    torch.cuda.synchronize()


def measure(batch: int, tokens: int, function: Any | None, configs: Sequence[Any]) -> dict[str, float]:
    """Returns microseconds of both, and of ours with other configs, and the largest difference of their outputs
    relative to the largest output.
    """
    bytes_of_one = batch * (_STATE_BYTES + tokens * (CHANNELS + WIDTH) * 2)
    made = [Inputs(batch, tokens) for _ in range(max(2, math.ceil(_ALL_BYTES / bytes_of_one)))]
    found, workspace = {}, Workspace(DEVICE)
    if function is not None:
        arguments = [inputs.for_fla() for inputs in made]
        expected = made[0].finished(function(**arguments[0])[0])
        actual = our_call(made[0], workspace)().float()
        found["difference"] = float((actual - expected).abs().max() / expected.abs().max())
        found["fla us"] = graph_microseconds([partial(function, **one) for one in arguments])
    found["ours us"] = graph_microseconds([our_call(inputs, workspace) for inputs in made])
    for config in configs:
        found[str(config)] = graph_microseconds([our_call(inputs, workspace, config) for inputs in made], 9)
        log_line(f"{batch} x {tokens}: {found[str(config)]:.2f} us with {config}")
    if function is not None:
        found["fla / ours"] = found["fla us"] / found["ours us"]
    return found


def main() -> None:
    """Times both at every shape."""
    parser = make_parser(__doc__)
    parser.add_argument("--fla", type=words, default=[], metavar="WHEELS", help="wheels of fla-core and einops")
    parser.add_argument("--sweep", action="store_true", help="time our kernels with other configs, too")
    parser.add_argument("--compile", type=integers, metavar="PART,PARTS", help="only compile fla's kernels")
    args = parser.parse_args()
    shapes = [(1, tokens) for tokens in PROMPTS] + [(batch, 1) for batch in BATCHES]
    result: dict[str, Any] = {"parts": {}}
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        functions = fla_functions(args.fla, folder)
        if args.compile and functions is not None:
            return compile_part(functions, *args.compile)
        if functions is not None:
            parts = max(1, min(12, (os.cpu_count() or 1) - 2))
            command = [sys.executable, __file__, "--fla", ",".join(args.fla), "--compile"]
            for process in [subprocess.Popen([*command, f"{part},{parts}"]) for part in range(parts)]:
                process.wait()
            log_line("compiled")
        for batch, tokens in shapes:
            function = None if functions is None else functions[int(tokens > 1)]
            configs = (SCAN_CONFIGS if tokens > 1 else STEP_CONFIGS) if args.sweep else []
            part = measure(batch, tokens, function, configs)
            result["parts"][f"{batch} x {tokens}"] = part
            save(args.out, result)
            torch.cuda.empty_cache()
    columns = ["ours us", "fla us", "fla / ours", "difference"]
    rows = [[name, *(part.get(column, "") for column in columns)] for name, part in result["parts"].items()]
    print_table(["sequences x tokens", *columns], rows)
    return None


if __name__ == "__main__":
    main()
