"""The GPU part: CUDA through ctypes, the device thread, copies and landing memory."""
