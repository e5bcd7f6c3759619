"""The gateway's own API: queries about the gateway itself; requests to engines belong to the pipeline."""
