"""Messages and facts that two engines exchange to transfer keys and values."""
