"""The endpoints as the gateway knows them now: their caches, their load, and their health."""
