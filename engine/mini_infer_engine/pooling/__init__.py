"""The pooling engine: models that read a text whole and generate none, such as encoders, beside the engine core."""
