"""The operator: turns an InferenceService into engine pods, or into local processes."""
