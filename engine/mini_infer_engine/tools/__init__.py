"""Commands beside the server: `mini-infer-compare`, and the tuning of kernels."""
