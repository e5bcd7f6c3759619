"""The HTTP layer, which knows no models: ASGI towards clients, a connection pool towards endpoints."""
