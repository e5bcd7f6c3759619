"""`quantization_config` of checkpoints, read into schemes of linear layers."""
