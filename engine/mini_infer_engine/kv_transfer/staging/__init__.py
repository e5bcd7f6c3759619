"""Host and device buffers that keys and values pass on their way between pools."""
