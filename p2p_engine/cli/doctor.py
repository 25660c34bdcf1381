"""`p2p-engine doctor`: checks an installation and a configuration before a fleet is started."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from p2p_engine.cli.config_check import config_problems, port_problem
from p2p_engine.cli.devices import GIB, visible_gpus
from p2p_engine.cli.display import busy
from p2p_engine.cli.findings import Finding, change, note, ok, show
from p2p_engine.cli.installation import check_installation
from p2p_engine.cli.ports import is_port_free
from p2p_engine.config import (
    GPU_TRANSPORTS,
    TRANSPORT_NAMES,
    EngineConfig,
    queue_risk,
    ucx_transports,
)
from p2p_engine.control.auth import MAX_CONNECTIONS
from p2p_engine.control.fleet_key import exposure, read_key_file
from p2p_engine.errors import ConfigError, P2pError
from p2p_engine.gpu.environment import check_environment
from p2p_engine.memory.host import (
    SOCKET_BUFFER_BYTES,
    SOCKET_LIMITS,
    available_memory_bytes,
    memory_bytes,
    socket_buffer_bytes,
)
from p2p_engine.sizing import MIB, Room, device_memory, has_landing_memory
from p2p_engine.transfer_config import (
    DEFAULT_KV_PORT,
    MODULE_KEY,
    NIXL_NAME,
    TransferConfig,
    extra_of,
    is_multi,
    our_config,
    unread_settings,
)
from p2p_engine.wire.addresses import is_any_address

PROXY_PORTS = (10001, 30001)
_CONNECT_SECONDS = 2.0  # to connect to a proxy, and again for its greeting
_ZMQ_SIGNATURE = b"\xff\x7f"  # the first and the tenth byte of a greeting
_ANY_CAPABILITY = 90  # that every release of NVRTC knows


def run_doctor(
    config: TransferConfig | None,
    model: str,
    tp_size: int,
    console: Console,
    room: Room | None = None,
) -> int:
    """Check everything; return the exit code: 1 if something must change.

    `room` is the memory that vLLM leaves on each GPU.
    """
    with busy(console, "checking the installation; importing vLLM may take half a minute"):
        findings = list(check_installation())
    findings += check_transports()
    findings.append(check_descriptors(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    if config is None:
        findings += [check_port("127.0.0.1", port, "the proxy's port") for port in PROXY_PORTS]
    else:
        findings += check_config(config, tp_size)
        findings += check_device_memory(config, room)
        findings += check_queues(config, os.environ) if room is not None else []
    if model:
        findings.append(check_model(model, tp_size))
    return show(findings, console)


def check_descriptors(limit: int) -> Finding:
    """Check the limit of descriptors: a rank lets in a quarter of it. A peer takes three."""
    if limit == resource.RLIM_INFINITY or limit >= 4 * MAX_CONNECTIONS:
        return ok("descriptors", f"{limit} for each process" if limit > 0 else "no limit")
    state = f"{limit} for each process: at most {limit // 4} peers may connect to each rank"
    return note("descriptors", state, f"for large fleets: ulimit -n {4 * MAX_CONNECTIONS}")


def check_config(config: TransferConfig, tp_size: int) -> Iterator[Finding]:
    """Check one instance's --kv-transfer-config, and its needs on this machine."""
    problems, ours = config_problems(config), None
    try:
        ours = our_config(config, os.environ)
    except ConfigError as error:  # a variable's, if no problem is known
        problems = problems or [str(error)]
    for problem in problems:
        yield change("configuration", problem, "docs/configuration.md has all settings")
    if ours is None:
        return
    with contextlib.suppress(ConfigError):
        settings = EngineConfig.from_extra_config(_settings_of(ours), num_local_ranks=tp_size)
        if not problems:
            where = ", in a MultiConnector" if is_multi(config) else ""
            yield ok("configuration", f"{ours['kv_role']}, {settings.send_type.value}{where}")
        yield from _check_needs(ours, settings, tp_size)
        if unread := unread_settings(config):
            state = f"{', '.join(unread)}: without effect"
            yield note(f"settings of {NIXL_NAME}", state, "docs/nixl_name.md")


def _check_needs(ours: TransferConfig, settings: EngineConfig, tp_size: int) -> Iterator[Finding]:
    path = str(ours.get(MODULE_KEY) or "p2p_engine.")
    if not path.startswith(("p2p_engine.", "vllm.")):
        state = f"vLLM takes the connector from {path}, not from this package"
        yield note(MODULE_KEY, state, "remove it, unless that module brings this connector")
    yield check_key(settings, listens_on=settings.host if "host" in _settings_of(ours) else "")
    port = str(ours.get("kv_port", DEFAULT_KV_PORT))
    if port.isdecimal() and not port_problem(ours):
        yield check_kv_port(settings.host, int(port))
    yield from _check_addresses(settings)
    yield check_memory(settings, str(ours.get("kv_role")), tp_size, available_memory_bytes())


def check_key(settings: EngineConfig, *, listens_on: str) -> Finding:
    """Check the key; without one, warn if other hosts can reach the instance."""
    try:
        secrets = read_key_file(settings.key_file)
    except ConfigError as error:
        return change("key", str(error), "p2p-engine keygen FILE makes one; docs/security.md")
    if secrets:
        return ok("key", f"{settings.key_file}: {len(secrets)} secrets, the first is used")
    warning = exposure(listens_on or "vLLM's own address", secrets)
    return note("key", "NONE: nothing is authenticated", warning) if warning else ok("key", "none")


def _settings_of(ours: TransferConfig) -> Mapping[str, Any]:
    """Return our settings; empty if they are not an object, which is reported elsewhere."""
    with contextlib.suppress(ConfigError):
        return extra_of(ours)
    return {}


def check_kv_port(host: str, port: int) -> Finding:
    """Check that the directory could listen there."""
    return check_port(host, port, "kv_port") if port else ok("kv_port", "0: any free port")


def _check_addresses(settings: EngineConfig) -> Iterator[Finding]:
    if settings.http_port:
        host = settings.http_host or settings.host
        yield check_port(host, settings.http_port, "http_port (vLLM's --port)")
    for host in settings.proxy_hosts:
        if is_any_address(host):
            state = f"{host} leads each instance to its own host"
            yield note("proxy_ip", state, "write the address of the proxy's host")
        yield check_proxy(host, settings.proxy_port)
    if not settings.proxy_hosts:
        yield note("proxy", "none configured", "instances without proxy_ip register with nobody")


def check_port(host: str, port: int, what: str) -> Finding:
    """Check that a server could listen there."""
    where = f"{host}:{port}"
    try:
        if is_port_free(host, port):
            return ok(what, f"{where} is free")
    except OSError as error:
        return change(what, str(error), f"{host} must be an address of this machine")
    return change(what, f"{where} is in use", "stop what listens there, or choose another port")


def check_proxy(host: str, port: int) -> Finding:
    """Check that a proxy takes registrations there; blocks for up to 4 seconds after the look-up of
    the name."""
    where = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as link:
            greeting = _greeting(link)
    except socket.gaierror as error:
        return change("proxy", f"{host}: {error.strerror}", "proxy_ip must be a name or address")
    except OSError as error:
        return note(
            "proxy", f"{where}: {error.strerror or error}", "start it with p2p-engine proxy"
        )
    if greeting[:1] + greeting[9:] != _ZMQ_SIGNATURE:
        remedy = "proxy_port is the proxy's --registration-port (30001), not its HTTP port"
        return change("proxy", f"{where} takes no registrations", remedy)
    return ok("proxy", f"{where} takes registrations")


def _greeting(link: socket.socket) -> bytes:
    """Return the ten bytes with which a ZMQ socket greets whoever connects; less from others."""
    try:
        return link.recv(10)
    except OSError:  # it says nothing, or has ended the connection
        return b""


def check_memory(
    settings: EngineConfig, kv_role: str, tp_size: int, available_bytes: int
) -> Finding:
    """Check that the buffer and pool of each rank fit, and that they can be page-locked if
    configured."""
    lands = has_landing_memory(kv_role, settings.send_type)
    per_rank = settings.kv_buffer_size + settings.pool_bytes if lands else 0
    needed = f"{per_rank * tp_size / GIB:.1f} GiB of {available_bytes / GIB:.1f} GiB available"
    needed += _about_pool(settings, tp_size) if lands else ""
    if per_rank * tp_size > available_bytes:
        remedy = "lower mem_pool_size_gb or kv_buffer_size; both are reserved for each rank"
        return change("memory", f"buffer and pool need {needed}", remedy)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if settings.page_lock and limit != resource.RLIM_INFINITY and limit < per_rank:
        remedy = "ulimit -l unlimited (in a container: --ulimit memlock=-1), or page_lock false"
        return change("memory", f"page_lock: only {limit / GIB:.1f} GiB may be locked", remedy)
    return ok("memory", f"buffer and pool need {needed}")


def check_device_memory(config: TransferConfig, room: Room | None) -> Iterator[Finding]:
    """Check that vLLM leaves enough memory on each GPU for the engine, which vLLM does not
    count."""
    with contextlib.suppress(ConfigError):
        ours = our_config(config)
        if room is None or ours.get("kv_buffer_device") == "cpu":
            return
        settings = EngineConfig.from_extra_config(_settings_of(ours)).on_device("cuda:0")
        lands = has_landing_memory(str(ours.get("kv_role")), settings.send_type)
        needed = device_memory(settings, receives=lands)
        state = f"the engine takes {needed}, vLLM leaves {max(0, room.left_bytes) / MIB:.0f} MiB"
        if room.lacking(needed):
            yield change("GPU memory", state, room.advice(needed))
        else:
            yield ok("GPU memory", state)


def check_queues(config: TransferConfig, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check that a GPU has as many hardware queues as the instance's role needs, and that no
    variable of NCCL's keeps the engine from starting."""
    with contextlib.suppress(ConfigError):
        ours = our_config(config)
        settings = EngineConfig.from_extra_config(_settings_of(ours)).on_device("cuda:0")
        risk = queue_risk(settings, str(ours.get("kv_role")), environment)
        if ours.get("kv_buffer_device") == "cpu" or "nccl" not in settings.transports:
            return
        if risk:
            yield note("hardware queues", "fewer than 32", risk)
        try:
            check_environment(
                environment, settings.nccl_num_channels, registers=settings.nccl_register
            )
        except ConfigError as error:
            yield change("environment", str(error), "an instance does not start with it")


def _about_pool(settings: EngineConfig, tp_size: int) -> str:
    share = f"pool {settings.pool_bytes / GIB:.1f} GiB for each of {tp_size} ranks"
    if settings.mem_pool_size_gb is not None:
        return f" ({share})"
    return f" ({share}: together a quarter of {memory_bytes() / GIB:.1f} GiB)"


def check_transports() -> Iterator[Finding]:
    """Check which transports can work here."""
    for name in TRANSPORT_NAMES:
        if name == "shm":
            yield check_shm()
        elif name == "tcp":
            yield check_tcp()
        elif name == "nixl":
            yield check_nixl()
        elif name in GPU_TRANSPORTS:
            yield check_gpus(name)
    if visible_gpus(os.environ):
        yield check_pack_kernel()


def check_gpus(transport: str) -> Finding:
    """Check that CUDA has GPUs: a variable may name some where there are none."""
    from p2p_engine.gpu.cuda import Cuda

    if not visible_gpus(os.environ):
        return note(transport, "no GPU here")
    try:
        return ok(transport, f"{Cuda().device_count()} GPUs")
    except P2pError as error:
        return note(transport, f"no GPU that CUDA can use: {error}")


def check_pack_kernel() -> Finding:
    """Check that the kernel which packs small regions can be compiled; takes a fifth of a
    second."""
    from p2p_engine.gpu.kernels import Compiler  # these load torch
    from p2p_engine.gpu.pack_kernel import KERNEL

    try:
        compiler = Compiler()
        compiler.compile(KERNEL, _ANY_CAPABILITY)
    except P2pError as error:
        remedy = (
            "each small region is a copy of its own, which is slower; torch for CUDA brings NVRTC "
            "(nvidia-cuda-nvrtc, with CUDA 12 nvidia-cuda-nvrtc-cu12)"
        )
        return note("pack kernel", str(error), remedy)
    major, minor = compiler.version
    return ok("pack kernel", f"NVRTC {major}.{minor} compiles it")


def check_nixl() -> Finding:
    """Check that NIXL is installed, and that UCX may use only what a fence can end."""
    if importlib.util.find_spec("nixl") is None:
        return note("nixl", "not installed; only instances with this transport need it")
    try:
        return ok("nixl", f"installed; UCX_TLS: {ucx_transports(os.environ)}")
    except P2pError as error:
        return note("nixl", str(error), "unset UCX_TLS for vLLM, or name only these")


def check_tcp() -> Finding:
    """Check that a loopback connection works, and that the kernel lets us choose its buffers."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return change("tcp", str(error), "allow connections on the loopback interface")
    low = [
        f"{name}={SOCKET_BUFFER_BYTES}"
        for name, option in SOCKET_LIMITS.items()
        if not socket_buffer_bytes(option)
    ]
    if low:
        state = "connections work; the kernel tunes their buffers, because its limits are low"
        return note("tcp", state, f"for hosts a millisecond apart: sysctl -w {' '.join(low)}")
    return ok("tcp", "connections work")


def check_shm() -> Finding:
    """Check that memory files can be created and passed over a Unix socket."""
    try:
        memory = os.memfd_create("p2p-doctor", os.MFD_ALLOW_SEALING)
        try:
            _hand_over(memory)
        finally:
            os.close(memory)
    except OSError as error:
        return change("shm", str(error), 'set "transports": "tcp", or allow memfd_create')
    return ok("shm", "memory files can be shared")


def _hand_over(descriptor: int) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(str(Path(folder) / "socket"))
        server.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(server.getsockname())
            socket.send_fds(client, [b"."], [descriptor])
            with server.accept()[0] as peer:
                for received in socket.recv_fds(peer, 1, 1)[1]:
                    os.close(received)


def check_model(model: str, tp_size: int) -> Finding:
    """Check that the model exists and that its KV heads can be divided among the ranks."""
    path = Path(model)
    if not path.is_dir():
        return note("model", f"{model} is not a folder", "vLLM looks for it on the model hub")
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        return change("model", str(error), "a model's folder has a config.json")
    if not isinstance(config, dict):
        return change("model", f"{path.name}: config.json is not a JSON object", "copy it again")
    heads = _num_kv_heads(config)
    if heads is None:
        return note("model", f"{path.name}: config.json does not say how many KV heads it has")
    if heads % tp_size and tp_size % heads:
        remedy = f"--tp must divide {heads}, or be a multiple of it"
        return change("model", f"{heads} KV heads over {tp_size} ranks", remedy)
    return ok("model", f"{path.name}: {heads} KV heads over {tp_size} ranks")


def _num_kv_heads(config: Mapping[str, Any]) -> int | None:
    """Return the number of KV heads in config.json; None if it is not stated in a known way."""
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        for key in ("num_key_value_heads", "num_attention_heads"):
            heads = part.get(key)
            if isinstance(heads, int) and heads > 0:
                return heads
    return None
