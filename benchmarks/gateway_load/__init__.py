"""Parts of gateway_overhead.py: an endpoint that thinks of nothing, clients, routers, a real vocabulary."""
