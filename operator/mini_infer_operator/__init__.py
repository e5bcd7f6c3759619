"""The operator: turns an InferenceService into engine pods, or into local processes."""

__version__ = "0.1.0"
