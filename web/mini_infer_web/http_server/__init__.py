"""The HTTP server of gateway and engine: uvicorn, with limits on what a client may do with a connection."""
