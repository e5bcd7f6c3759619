"""GPUs as kernel choices see them, for tests on machines without one."""

from mini_infer_engine.kernels.device import DeviceProfile

H200 = DeviceProfile("NVIDIA H200", (9, 0), 132, 227 << 10, 228 << 10, "3.6.0")
H100 = DeviceProfile("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 << 10, 228 << 10, "3.6.0")
H100_PCIE = DeviceProfile("NVIDIA H100 PCIe", (9, 0), 114, 227 << 10, 228 << 10, "3.6.0")
L4 = DeviceProfile("NVIDIA L4", (8, 9), 58, 99 << 10, 100 << 10, "3.6.0")
H200_OTHER_TRITON = DeviceProfile("NVIDIA H200", (9, 0), 132, 227 << 10, 228 << 10, "3.7.1")
