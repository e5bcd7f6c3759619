"""What attacks the fleet: each module has one coroutine that goes on until it is cancelled."""
