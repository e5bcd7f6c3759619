"""Reports which kernels an engine runs, and why some are off, for the log, `--version` and /metrics."""

import importlib.util
import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch

from mini_infer_engine.config.options.mechanisms import Mechanism
from mini_infer_engine.kernels.policy import KernelPolicy, kernel_policy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The active kernels; each field is a label of the metric."""

    device: str
    triton: str
    gemm: str
    """The GEMM for few rows: pdl_gemm, small_m_gemm, cublas, or torch."""
    gemm_configs: str
    """The GPU on which the GEMMs' tile configs were measured, which may be another than this; empty: none are used."""
    decode_attention: str
    prefill_attention: str
    """The fastest attention kernel that passes with prompts may use."""
    disabled: str = ""
    """Mechanisms that settings switch off."""
    off: str = ""
    """The reason why our kernels for Hopper cannot run; empty: they can, or the GPU is no Hopper."""
    kv_cache: str = ""
    """The format of quantised keys and values: float8_e4m3fn, int8; empty: they are not quantised."""
    weights: str = ""
    """The format of quantised weights, by an option (int8, fp8, int4, w8a8-int8) or the checkpoint; empty: none."""

    @property
    def labels(self) -> dict[str, str]:
        """The fields by name, for the metric."""
        return asdict(self)

    def __str__(self) -> str:
        """Formats the report as one line for people."""
        attention = f"decode attention {self.decode_attention}, prefill attention {self.prefill_attention}"
        where = f"{self.device}, Triton {self.triton}" if self.triton else self.device
        disabled = f"; disabled: {self.disabled}" if self.disabled else ""
        off = f"; Gluon kernels off: {self.off}" if self.off else ""
        configs = f" with tile configs measured on {self.gemm_configs}" if self.gemm_configs else ""
        pages = f", keys and values in {self.kv_cache}" if self.kv_cache else ""
        weights = f" of weights in {self.weights}" if self.weights else ""
        return f"GEMM {self.gemm}{weights}{configs}, {attention}{pages} ({where}){disabled}{off}"


def kernel_report(
    name: str | None = None,
    backend: str = "auto",
    disabled: Iterable[str] = (),
    kv_cache: str = "",
    weights: str = "",
) -> KernelReport:
    """Returns the report for an engine on the device of this name ("cuda:0"), by default the best one available.

    kv_cache and weights are their quantisation formats, or empty. Raises ValueError if `disabled` has an unknown name.
    """
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type != "cuda" or backend == "torch" or importlib.util.find_spec("triton") is None:
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return KernelReport(device_name, "", "torch", "", "torch", "torch", kv_cache=kv_cache, weights=weights)
    return report_of(kernel_policy(device, disabled), backend, kv_cache, weights)


def report_of(policy: KernelPolicy, backend: str = "auto", kv_cache: str = "", weights: str = "") -> KernelReport:
    """Returns the report of a policy's kernels: those that it chooses for the most favourable sizes."""
    profile = policy.profile
    gemm = policy.small_m_config(1, 4096, 4096, torch.bfloat16, tma_operands=True)
    kernels = {"PdlGemmConfig": "pdl_gemm", "SmallMConfig": "small_m_gemm", "NoneType": "cublas"}
    return KernelReport(
        profile.name,
        profile.triton_version,
        kernels[type(gemm).__name__],
        policy.tuned.origin if gemm is not None and policy.uses(Mechanism.TUNED_CONFIGS) else "",
        "flash_decoding_pdl" if policy.decode_config(1, 1).pdl else "flash_decoding",
        _prefill_attention(policy, backend, kv_cache),
        ",".join(sorted(policy.disabled)),
        (profile.gluon_obstacle or "") if profile.is_hopper else "",
        kv_cache,
        weights,
    )


def _prefill_attention(policy: KernelPolicy, backend: str, kv_cache: str) -> str:
    if backend == "flash":
        return "flash_attn"
    is_hopper = policy.wide_pages if kv_cache else policy.hopper_fa3
    return "flash_attention_3" if is_hopper else "flash_attention_2"


def log_kernels(report: KernelReport) -> None:
    """Logs the kernels when an engine starts: as a warning if a Hopper GPU lacks the kernels that were made for it."""
    if report.off:
        log.warning("kernels: %s. Install the torch and Triton of constraints-gpu.txt", report)
    else:
        log.info("kernels: %s", report)
