"""Flow control: requests wait at the gateway instead of at engines, and each endpoint gets just enough to stay busy."""
