"""The GPU part: CUDA's driver, the device thread, copies and landing memory."""
