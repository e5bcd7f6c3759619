"""What an engine says of its kernels: which run, which settings switch off, and why those for Hopper cannot run."""

import logging

import pytest

from mini_infer_engine.config.options.mechanisms import Mechanism
from mini_infer_engine.core_process.build import describe_kernels
from mini_infer_engine.kernels.gemm.tuned_configs import load_tuned_configs
from mini_infer_engine.kernels.policy import KernelPolicy
from mini_infer_engine.kernels.report import kernel_report, log_kernels, report_of
from tests.engine.kernels.profiles import H100, H200, H200_OTHER_TRITON, L4


def test_kernel_report_has_all_kernels_on_hopper_with_the_pinned_triton() -> None:
    report = report_of(KernelPolicy(H200))
    assert (report.gemm, report.decode_attention) == ("pdl_gemm", "flash_decoding_pdl")
    assert (report.prefill_attention, report.off, report.disabled) == ("flash_attention_3", "", "")
    assert report_of(KernelPolicy(H200), "flash").prefill_attention == "flash_attn"
    quantised = report_of(KernelPolicy(H200), kv_cache="int8")
    assert quantised.prefill_attention == "flash_attention_3"
    assert "prefill attention flash_attention_3, keys and values in int8 (NVIDIA H200" in str(quantised)
    narrow = report_of(KernelPolicy(H200, frozenset({Mechanism.WIDE_PAGES})), kv_cache="int8")
    assert narrow.prefill_attention == "flash_attention_2"


def test_kernel_report_explains_what_is_off_when_triton_differs(caplog: pytest.LogCaptureFixture) -> None:
    report = report_of(KernelPolicy(H200_OTHER_TRITON))
    assert (report.gemm, report.prefill_attention) == ("small_m_gemm", "flash_attention_2")
    with caplog.at_level(logging.INFO):
        log_kernels(report)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Gluon kernels off: Triton 3.7.1, they need 3.6.x" in record.message
    assert "constraints-gpu.txt" in record.message


def test_kernel_report_names_disabled_mechanisms(caplog: pytest.LogCaptureFixture) -> None:
    report = report_of(KernelPolicy(H200, frozenset({Mechanism.PDL, Mechanism.HOPPER_FA3})))
    assert (report.gemm, report.decode_attention) == ("small_m_gemm", "flash_decoding")
    assert (report.disabled, report.off) == ("hopper_fa3,pdl", "")
    with caplog.at_level(logging.INFO):
        log_kernels(report)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert "disabled: hopper_fa3,pdl" in caplog.text


def test_kernel_report_names_the_gpu_whose_configs_are_used() -> None:
    report = report_of(KernelPolicy(H100, tuned=load_tuned_configs(H100.name)))
    assert report.gemm_configs == "NVIDIA H200"
    assert "GEMM pdl_gemm with tile configs measured on NVIDIA H200, " in str(report)
    assert "NVIDIA H100 80GB HBM3" in str(report)


def test_kernel_report_lists_nothing_as_off_on_other_gpus() -> None:
    report = report_of(KernelPolicy(L4))
    assert (report.gemm, report.prefill_attention, report.off) == ("cublas", "flash_attention_2", "")


def test_kernel_report_names_torch_on_a_cpu() -> None:
    report = kernel_report("cpu")
    assert str(report) == "GEMM torch, decode attention torch, prefill attention torch (cpu)"
    assert report.labels["device"] == "cpu"
    quantised = kernel_report("cpu", kv_cache="int8", weights="int4")
    assert str(quantised).startswith("GEMM torch of weights in int4, ")
    assert (quantised.labels["weights"], quantised.labels["kv_cache"]) == ("int4", "int8")
    assert describe_kernels()
