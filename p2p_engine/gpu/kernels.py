"""Kernels: CUDA C, compiled by NVRTC when a device starts, launched by the driver.

Both are where there is torch for CUDA: NVRTC is one of its dependencies, the driver belongs to the
machine. Handles are NVIDIA's objects.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from p2p_engine.errors import ConfigError, TransportError
from p2p_engine.gpu.cuda import Cuda, load_bindings, run_bound


class Compiler:
    """NVRTC, of the release that torch brings."""

    def __init__(self) -> None:
        """Load it.

        Raises:
            ConfigError: there is none, or no bindings of it.
        """
        self._nvrtc = load_bindings("nvrtc")
        try:
            self.version: tuple[int, int] = self._call(self._nvrtc.nvrtcVersion)  # (13, 0)
        except RuntimeError as error:  # the bindings find no library
            raise ConfigError(f"NVRTC cannot be loaded: {error}") from error

    def compile(self, source: str, capability: int) -> bytes:
        """Return what the driver can load on a device of this compute capability, such as 90:
        machine code, or assembly where the device is newer than the compiler. Takes a fifth of a
        second.

        Raises:
            TransportError: it does not compile; with the first line of the log.
        """
        nvrtc, known = self._nvrtc, self._call(self._nvrtc.nvrtcGetSupportedArchs)
        is_known = capability in known
        newest = max((each for each in known if each <= capability), default=capability)
        option = f"--gpu-architecture={f'sm_{capability}' if is_known else f'compute_{newest}'}"
        name = b"p2p_engine.cu"
        program = self._call(nvrtc.nvrtcCreateProgram, source.encode(), name, 0, None, None)
        try:
            (code,) = run_bound(nvrtc.nvrtcCompileProgram, program, 1, [option.encode()])
            if code:
                log = self._read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
                lines = log.decode(errors="replace").splitlines()
                raise TransportError(f"NVRTC: {code.name}: {lines[0] if lines else ''}")
            if is_known:
                return self._read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
            return self._read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def _read(self, get_size: Callable[..., Any], get: Callable[..., Any], program: Any) -> bytes:
        buffer = bytearray(self._call(get_size, program))
        self._call(get, program, buffer)
        return bytes(buffer)

    def _call(self, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
        code, *results = run_bound(function, *arguments)
        if code:
            raise TransportError(f"{function.__name__}: {code.name}")
        return results[0] if len(results) == 1 else tuple(results)


class Kernels:
    """The kernels of one source on the calling thread's device; its thread launches them."""

    def __init__(self, cuda: Cuda, device: int, source: str) -> None:
        """Compile and load them. May wait for the whole device.

        Raises:
            ConfigError: NVRTC is not to be found.
            TransportError: NVRTC or the driver refuses.
        """
        self._cuda = cuda
        image = Compiler().compile(source, cuda.compute_capability(device))
        self._module = cuda.call(cuda.driver.cuModuleLoadData, image)
        self._functions: dict[str, Any] = {}

    def launch(self, name: str, blocks: int, threads: int, stream: int, *arguments: int) -> None:
        """Enqueue a kernel whose arguments are all addresses and 64-bit integers. The first launch
        of each kernel loads it, which may wait for the whole device.

        Raises:
            TransportError: the driver refuses.
        """
        values = (arguments, (ctypes.c_longlong,) * len(arguments))
        self._cuda.call(
            self._cuda.driver.cuLaunchKernel, self._function(name), blocks, 1, 1, threads, 1, 1, 0,
            stream, values, 0,
        )  # fmt: skip

    def close(self) -> None:
        """Unload them. None may run; idempotent."""
        if self._module is not None:
            self._cuda.call(self._cuda.driver.cuModuleUnload, self._module)
        self._module = None

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            get = self._cuda.driver.cuModuleGetFunction
            self._functions[name] = self._cuda.call(get, self._module, name.encode())
        return self._functions[name]
