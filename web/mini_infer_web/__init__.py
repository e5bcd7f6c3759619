"""The web kit of engine and gateway: a limited HTTP server, keys, CORS, TLS, request bodies, errors and access logs."""
