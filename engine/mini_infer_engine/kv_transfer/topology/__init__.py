"""Facts of processes and pools that decide how engines reach each other's memory."""
