"""A discrete-event simulation of routing: the gateway's real router, index and ledger in front of modelled engines."""
