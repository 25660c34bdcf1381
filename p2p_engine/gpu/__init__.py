"""What works with a GPU: CUDA by ctypes, the device thread, copies and landing memory."""
