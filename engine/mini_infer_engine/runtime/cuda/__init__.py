"""The executor for NVIDIA GPUs: CUDA graphs, sampling, speculation and state on the device."""
