"""Messages that two engines exchange to transfer keys and values, and checks of them."""
