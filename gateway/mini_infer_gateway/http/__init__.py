"""HTTP itself, knowing no model: ASGI towards clients, a connection pool towards endpoints."""
