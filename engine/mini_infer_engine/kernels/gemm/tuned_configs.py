"""Loads measured tile configs of GEMMs by shape: one JSON file for each GPU in configs/, read when needed.

Configs that `mini-infer tune` has measured on this machine are in such a file in the user's cache folder, and take
precedence. `mini-infer tune --out` writes a whole file. Does not decide what runs for shapes without a config:
`gemm_rules` does.
"""

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from mini_infer_engine.kernels.gemm.gemm_config import LargeMConfig, PdlGemmConfig, SmallMConfig

log = logging.getLogger(__name__)

FALLBACK_DEVICE = "NVIDIA H200"
"""The GPU whose configs serve all GPUs that have no file of their own and as much shared memory."""
Shape = tuple[int, int, bool, int]
"""N, K, gated, and M of the tile: 8 (pdl_gemm alone), 16, 32 or 64."""
QuantizedShape = tuple[str, int, int, bool, int]
"""`QuantizedWeight.format`, followed by the fields of `Shape`."""
LargeShape = tuple[str, int, int, int]
"""`QuantizedWeight.format`, N, K, and rows, which are those of `rows_of_large_m`."""
GemmConfig = PdlGemmConfig | SmallMConfig
_KERNELS: dict[str, type[GemmConfig]] = {"pdl_gemm": PdlGemmConfig, "small_m_gemm": SmallMConfig}
_LARGE_M = "large_m_gemm"
LARGE_M_ROWS = (128, 256, 512, 1024, 2048, 4096)
"""Rows for which large_m_gemm has configs; others take those of the next larger number, or of the largest."""
_CUBLAS = "cublas"


@dataclass(frozen=True, slots=True)
class TunedConfigs:
    """The fastest config by shape; None: cuBLAS is faster, including the kernel that a norm then needs."""

    device: str
    with_pdl: Mapping[Shape, GemmConfig | None]
    """Configs where pdl_gemm can run: its own or another kernel's."""
    portable: Mapping[Shape, SmallMConfig | None]
    """Configs where pdl_gemm cannot run, for tiles of at least 16 rows."""
    quantized: Mapping[QuantizedShape, PdlGemmConfig] = field(default_factory=dict)
    """Configs of pdl_gemm with quantised weights."""
    large_m: Mapping[LargeShape, LargeMConfig | None] = field(default_factory=dict)
    """Configs of large_m_gemm; None: a bf16 copy of the weights and cuBLAS are faster."""

    local: int = 0
    """The number of these that were measured on this machine."""

    @property
    def origin(self) -> str:
        """The place of the measurements as text for people; empty: there are none."""
        return f"{self.device} and {self.local} of {tuned_configs_folder()}" if self.local else self.device


NO_TUNED_CONFIGS = TunedConfigs("", {}, {})


@functools.cache
def load_tuned_configs(device: str) -> TunedConfigs:
    """Returns the package's configs for a GPU of this name, overridden by those measured on this machine."""
    packaged, local = packaged_configs(device), cached_configs(device)
    if local is None:
        return packaged
    return replace(
        packaged,
        with_pdl={**packaged.with_pdl, **local.with_pdl},
        portable={**packaged.portable, **local.portable},
        quantized={**packaged.quantized, **local.quantized},
        large_m={**packaged.large_m, **local.large_m},
        local=len(local.with_pdl) + len(local.portable) + len(local.quantized) + len(local.large_m),
    )


def tuned_configs_folder() -> Path:
    """Returns the folder to which `mini-infer tune` writes: in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return cache / "mini-infer" / "gemm-configs"


def cached_configs(device: str) -> TunedConfigs | None:
    """Returns the configs measured on this machine for a GPU of this name, or None.

    A file that cannot be read is logged and ignored.
    """
    file = tuned_configs_folder() / file_name(device)
    try:
        return parse_tuned_configs(device, file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is not used: %s; delete it, or run `mini-infer tune` again", file, error)
        return None


def packaged_configs(device: str) -> TunedConfigs:
    """Returns the package's configs for a GPU of this name, or the fallback's."""
    folder = resources.files(__package__) / "configs"
    file = folder / file_name(device)
    if not file.is_file():
        device, file = FALLBACK_DEVICE, folder / file_name(FALLBACK_DEVICE)
    return parse_tuned_configs(device, file.read_text())


def file_name(device: str) -> str:
    """Returns the name of the file of a GPU's configs, from its driver's name of the GPU."""
    return f"{device.replace(' ', '_')}.json"


def parse_tuned_configs(device: str, text: str) -> TunedConfigs:
    """Parses a file's content. Raises ValueError if it is not such a file."""
    data = json.loads(text)
    with_pdl = dict(map(_parse, data["with_pdl"]))
    portable = dict(map(_parse, data["portable"]))
    foreign = [shape for shape, config in portable.items() if isinstance(config, PdlGemmConfig)]
    if foreign:
        raise ValueError(f"tuned configs of {device}: {foreign[0]} needs pdl_gemm but stands under 'portable'")
    quantized = {(entry["format"], *shape): config for entry in data["quantized"] for shape, config in [_parse(entry)]}
    large_m = dict(map(_parse_large, data.get("large_m", [])))
    # The types were checked just above, and by `_parse`.
    return TunedConfigs(device, with_pdl, portable, quantized, large_m)  # type: ignore[arg-type]


def rows_of_large_m(m: int) -> int:
    """Returns the member of LARGE_M_ROWS whose config m rows take."""
    return next((rows for rows in LARGE_M_ROWS if m <= rows), LARGE_M_ROWS[-1])


def _parse_large(entry: dict[str, Any]) -> tuple[LargeShape, LargeMConfig | None]:
    shape, kernel = (entry["format"], entry["N"], entry["K"], entry["M"]), entry["kernel"]
    if kernel not in (_LARGE_M, _CUBLAS):
        raise ValueError(f"tuned configs: unknown kernel {kernel!r} for {shape}: there are {_LARGE_M}, {_CUBLAS}")
    return shape, LargeMConfig(**entry["config"]) if kernel == _LARGE_M else None


def _parse(entry: dict[str, Any]) -> tuple[Shape, GemmConfig | None]:
    shape = (entry["N"], entry["K"], entry["gated"], entry["M"])
    kernel = entry["kernel"]
    if kernel == _CUBLAS:
        return shape, None
    if kernel not in _KERNELS:
        raise ValueError(
            f"tuned configs: unknown kernel {kernel!r} for {shape}: there are {', '.join(_KERNELS)}, cublas"
        )
    return shape, _KERNELS[kernel](**entry["config"])


def tuned_configs_json(configs: TunedConfigs) -> str:
    """Formats configs as a file: one line for each shape, sorted."""
    parts = {
        name: ",\n".join(f"    {json.dumps(_entry(shape, config))}" for shape, config in sorted_items(table))
        for name, table in (("with_pdl", configs.with_pdl), ("portable", configs.portable))
    }
    parts["quantized"] = ",\n".join(
        f"    {json.dumps({'format': form} | _entry((n, k, gated, m), config))}"
        for (form, n, k, gated, m), config in sorted(configs.quantized.items(), key=lambda item: item[0])
    )
    parts["large_m"] = ",\n".join(
        f"    {json.dumps(_large_entry(shape, config))}"
        for shape, config in sorted(configs.large_m.items(), key=lambda item: item[0])
    )
    tables = ",\n".join(f'  "{name}": [\n{lines}\n  ]' if lines else f'  "{name}": []' for name, lines in parts.items())
    return f'{{\n  "device": {json.dumps(configs.device)},\n{tables}\n}}\n'


def _large_entry(shape: LargeShape, config: LargeMConfig | None) -> dict[str, Any]:
    entry = dict(zip(("format", "N", "K", "M"), shape, strict=True))
    if config is None:
        return entry | {"kernel": _CUBLAS}
    return entry | {"kernel": _LARGE_M, "config": _entry_fields(config)}


def _entry_fields(config: GemmConfig | LargeMConfig) -> dict[str, Any]:
    """Returns a config's fields that differ from their defaults."""
    usual = {each.name: each.default for each in fields(config)}
    return {name: value for name, value in asdict(config).items() if value != usual[name]}


def sorted_items(table: Mapping[Shape, GemmConfig | None]) -> list[tuple[Shape, GemmConfig | None]]:
    """Returns the items in order of N, K, gated, M."""
    return sorted(table.items(), key=lambda item: item[0])


def _entry(shape: Shape, config: GemmConfig | None) -> dict[str, Any]:
    n, k, gated, m = shape
    names = {kind: name for name, kind in _KERNELS.items()}
    entry: dict[str, Any] = {"N": n, "K": k, "gated": gated, "M": m}
    if config is None:
        return entry | {"kernel": _CUBLAS}
    return entry | {"kernel": names[type(config)], "config": _entry_fields(config)}
