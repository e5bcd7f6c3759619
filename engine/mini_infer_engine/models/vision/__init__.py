"""Vision encoders: transformers' towers with their projectors, whose outputs our decoders read."""
