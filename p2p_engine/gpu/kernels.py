"""Kernels: CUDA C, compiled by NVRTC when a device starts, launched by the driver, through ctypes.

Both libraries are where there is torch for CUDA: NVRTC is one of its dependencies, the driver
belongs to the machine. Handles are plain integers.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char_p, c_int, c_longlong, c_size_t, c_uint, c_void_p
from pathlib import Path

from p2p_engine.errors import TransportError
from p2p_engine.gpu.cuda import Cuda
from p2p_engine.gpu.shared_library import bind, load_library

WHEELS = ("nvidia.cu13", "nvidia.cuda_nvrtc")

_COMPILER: dict[str, tuple[object, ...]] = {
    "nvrtcVersion": (c_void_p, c_void_p),
    "nvrtcGetNumSupportedArchs": (c_void_p,),
    "nvrtcGetSupportedArchs": (c_void_p,),
    "nvrtcCreateProgram": (c_void_p, c_char_p, c_char_p, c_int, c_void_p, c_void_p),
    "nvrtcCompileProgram": (c_void_p, c_int, c_void_p),
    "nvrtcDestroyProgram": (c_void_p,),
    "nvrtcGetProgramLogSize": (c_void_p, c_void_p),
    "nvrtcGetProgramLog": (c_void_p, c_void_p),
    "nvrtcGetCUBINSize": (c_void_p, c_void_p),
    "nvrtcGetCUBIN": (c_void_p, c_void_p),
    "nvrtcGetPTXSize": (c_void_p, c_void_p),
    "nvrtcGetPTX": (c_void_p, c_void_p),
}
_DRIVER: dict[str, tuple[object, ...]] = {
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, c_void_p),
}


class Compiler:
    """NVRTC of one release of CUDA."""

    def __init__(self, major: int) -> None:
        """Load it from torch's wheels or the system.

        Raises:
            ConfigError: there is none.
        """
        soname = f"libnvrtc.so.{major}"
        self._library = load_library("", (soname,), WHEELS)
        bind(self._library, c_int, _COMPILER)
        bind(self._library, c_char_p, {"nvrtcGetErrorString": (c_int,)})
        self._builtins = _load_beside(soname, "libnvrtc-builtins.so.*")

    def version(self) -> tuple[int, int]:
        """Return its version, such as (13, 0)."""
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        return major.value, minor.value

    def compile(self, source: str, capability: int) -> bytes:
        """Return what the driver can load on a device of this compute capability, such as 90:
        machine code, or assembly where the device is newer than the compiler. Takes a fifth of a
        second.

        Raises:
            TransportError: it does not compile; with the first line of the log.
        """
        known = self._architectures()
        is_known = capability in known
        newest = max((each for each in known if each <= capability), default=capability)
        option = f"--gpu-architecture={f'sm_{capability}' if is_known else f'compute_{newest}'}"
        program, name = c_void_p(), b"p2p_engine.cu"
        self._call("nvrtcCreateProgram", byref(program), source.encode(), name, 0, None, None)
        try:
            code = self._library.nvrtcCompileProgram(program, 1, (c_char_p * 1)(option.encode()))
            if code:
                lines = self._read(program, "ProgramLog").decode(errors="replace").splitlines()
                raise TransportError(f"NVRTC: {self._text(code)}: {lines[0] if lines else ''}")
            return self._read(program, "CUBIN" if is_known else "PTX")
        finally:
            self._library.nvrtcDestroyProgram(byref(program))

    def _architectures(self) -> list[int]:
        count = c_int()
        self._call("nvrtcGetNumSupportedArchs", byref(count))
        known = (c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", known)
        return list(known)

    def _read(self, program: c_void_p, what: str) -> bytes:
        size = c_size_t()
        self._call(f"nvrtcGet{what}Size", program, byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise TransportError(f"{name}: {self._text(code)}")

    def _text(self, code: int) -> str:
        return bytes(self._library.nvrtcGetErrorString(code)).decode()


class Kernels:
    """The kernels of one source on the calling thread's device; its thread launches them."""

    def __init__(self, cuda: Cuda, device: int, source: str) -> None:
        """Compile and load them. May wait for the whole device.

        Raises:
            ConfigError: NVRTC or the driver is not to be found.
            TransportError: one of them refuses.
        """
        compiler = Compiler(cuda.versions()[0] // 1000)
        self._driver = load_library("", ("libcuda.so.1",), ())
        bind(self._driver, c_int, _DRIVER)
        module = c_void_p()
        image = compiler.compile(source, cuda.compute_capability(device))
        self._call("cuModuleLoadData", byref(module), image)
        self._module = module.value
        self._functions: dict[str, int] = {}

    def launch(self, name: str, blocks: int, threads: int, stream: int, *arguments: int) -> None:
        """Enqueue a kernel whose arguments are all addresses and 64-bit integers. The first launch
        of each kernel loads it, which may wait for the whole device.

        Raises:
            TransportError: the driver refuses.
        """
        values = [c_longlong(argument) for argument in arguments]
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self._call(
            "cuLaunchKernel", self._function(name), blocks, 1, 1, threads, 1, 1, 0, stream,
            pointers, None,
        )  # fmt: skip

    def close(self) -> None:
        """Unload them. None may run; idempotent."""
        if self._module:
            self._call("cuModuleUnload", self._module)
        self._module = None

    def _function(self, name: str) -> int:
        if name not in self._functions:
            function = c_void_p()
            self._call("cuModuleGetFunction", byref(function), self._module, name.encode())
            self._functions[name] = function.value or 0
        return self._functions[name]

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._driver, name)(*arguments):
            text = c_char_p()
            self._driver.cuGetErrorName(code, byref(text))
            raise TransportError(f"{name}: {(text.value or b'unknown').decode()} ({code})")


def _load_beside(soname: str, pattern: str) -> list[ctypes.CDLL]:
    """Load what a library asks for by its bare name, from the folder where the library lies: the
    wheels of CUDA 13 do not say where that is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith(soname):
            return [
                ctypes.CDLL(str(found), mode=os.RTLD_LOCAL) for found in path.parent.glob(pattern)
            ]
    return []
