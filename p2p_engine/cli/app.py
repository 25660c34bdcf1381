"""The commands and their options. Each command's work is in a module of its own."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from p2p_engine.config import SendMode
from p2p_engine.errors import ConfigError

app = typer.Typer(
    name="p2p-engine",
    help="KV-cache transfer between prefill and decode instances of vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options
)
MAX_GPU_GIB = 1 << 20
MAX_PORT = 65535
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


_UNBOUNDED_COLUMNS = 160  # without a terminal, lines must not be wrapped


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_UNBOUNDED_COLUMNS)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise typer.BadParameter("not a JSON object")
    return value


def _words(option: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from error


def _number(value: float) -> float:
    """Refuse NaN, which passes every range check."""
    if math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


TransferConfig = Annotated[
    dict[str, Any] | None,
    typer.Option(
        "--kv-transfer-config",
        parser=_json_object,
        metavar="JSON",
        help="The connector's settings, in the form that `vllm serve` takes.",
    ),
]
GpuMemory = Annotated[
    float,
    typer.Option(
        min=0,
        max=MAX_GPU_GIB,
        callback=_number,
        metavar="GIB",
        help="Memory of each GPU; 0: ask the driver, if there is one.",
    ),
]
GpuMemoryUtilization = Annotated[
    float, typer.Option(min=0.01, max=1, callback=_number, help="vLLM's setting.")
]
ProxyPort = Annotated[int, typer.Option(min=0, max=MAX_PORT, help="The proxy's HTTP port.")]
RegistrationPort = Annotated[
    int, typer.Option(min=0, max=MAX_PORT, help="Where instances register.")
]
Join = Annotated[
    str, typer.Option(help="HOST:REGISTRATION_PORT (30001) of a proxy to join instead.")
]
KvEvents = Annotated[
    bool,
    typer.Option(
        "--kv-events",
        help="Tell the proxy by vLLM's KV events what each instance has cached. vLLM publishes the "
        "tokens of prompts, without a key, to whoever reaches two ports of each on --host.",
    ),
]
KvCacheMemoryBytes = Annotated[
    int, typer.Option(min=0, help="vLLM's setting; 0: not set, as in vLLM.")
]


@app.command()
def launch(
    model: Annotated[str, typer.Option(help="A model's name or folder.")],
    prefill: Annotated[int, typer.Option(min=0, help="How many prefill instances.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="How many decode instances.")] = 1,
    both: Annotated[int, typer.Option(min=0, help="How many instances with both roles.")] = 0,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size of each.")] = 1,
    send_type: Annotated[str, typer.Option(help="PUT_ASYNC, PUT or GET.")] = "PUT_ASYNC",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: ProxyPort = 10001,
    registration_port: RegistrationPort = 30001,
    join: Join = "",
    key_file: Annotated[str, typer.Option(help="The fleet's key, made by keygen.")] = "",
    log_dir: Annotated[Path | None, typer.Option(help="Default: a new temporary one.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until all must be ready.")] = 1800.0,
    kv_transfer_config: TransferConfig = None,
    kv_events: KvEvents = False,
    prefill_args: Annotated[str, typer.Option(help="vLLM arguments for prefill only.")] = "",
    decode_args: Annotated[str, typer.Option(help="vLLM arguments for decode only.")] = "",
    proxy_args: Annotated[str, typer.Option(help="Arguments of the proxy: policies, ...")] = "",
    vllm_args: Annotated[list[str] | None, typer.Argument(metavar="-- VLLM_ARGUMENTS")] = None,
) -> None:
    """Start a proxy and vLLM instances on this machine; Ctrl-C stops them all.

    Each instance gets free ports, its own cores or GPUs, a log file and a --kv-transfer-config. The
    JSON of the option --kv-transfer-config is merged into each.
    """
    from p2p_engine.cli.launch import LaunchOptions, run_launch

    try:
        options = LaunchOptions(
            model=model,
            num_prefill=prefill,
            num_decode=decode,
            num_both=both,
            tp_size=tp,
            send_type=send_type,
            host=host,
            port=port,
            registration_port=registration_port,
            join=join,
            key_file=key_file,
            log_dir=log_dir,
            timeout_seconds=timeout,
            transfer_config=kv_transfer_config or {},
            kv_events=kv_events,
            vllm_args=tuple(vllm_args or ()),
            prefill_args=_words("--prefill-args", prefill_args),
            decode_args=_words("--decode-args", decode_args),
            proxy_args=_words("--proxy-args", proxy_args),
        )
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(run_launch(options, _console()))


@app.command()
def simulate(
    prefill: Annotated[int, typer.Option(min=0, help="How many prefill stand-ins.")] = 2,
    decode: Annotated[int, typer.Option(min=0, help="How many decode stand-ins.")] = 2,
    both: Annotated[int, typer.Option(min=0, help="How many stand-ins with both roles.")] = 0,
    model: Annotated[str, typer.Option(help="The model name that they serve.")] = "simulated",
    send_type: Annotated[str, typer.Option(help="PUT_ASYNC, PUT or GET.")] = "PUT_ASYNC",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: ProxyPort = 10001,
    registration_port: RegistrationPort = 30001,
    join: Join = "",
    key_file: Annotated[str, typer.Option(help="The fleet's key, made by keygen.")] = "",
    log_dir: Annotated[Path | None, typer.Option(help="Default: a new temporary one.")] = None,
    proxy_args: Annotated[str, typer.Option(help="Arguments of the proxy: policies, ...")] = "",
    autoscale: Annotated[
        str,
        typer.Option(
            metavar="ROLE=MIN:MAX:TARGET,...",
            help="Add and drain stand-ins as Kubernetes would, for TARGET requests in flight each.",
        ),
    ] = "",
    autoscale_interval: Annotated[
        float, typer.Option(min=0.1, callback=_number, help="Seconds between two looks.")
    ] = 2.0,
    autoscale_window: Annotated[
        float,
        typer.Option(min=0, callback=_number, help="Seconds that one more is not removed."),
    ] = 30.0,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="-- COSTS")] = None,
) -> None:
    """Start a proxy and stand-ins for vLLM: servers and transfers are real, KV and tokens made up.

    Commands on standard input add, drain, stop and kill stand-ins; `help` lists the commands.
    Options after -- set the simulated costs: see `python -m p2p_engine.simulate --help`.
    """
    from p2p_engine.cli.autoscale import AutoscaleOptions
    from p2p_engine.cli.launch import LaunchOptions
    from p2p_engine.cli.replicas import read_ranges
    from p2p_engine.cli.simulate import run_simulate

    if autoscale and (both or join):
        raise typer.BadParameter("--autoscale: neither with --both nor with --join")
    try:
        scaling = AutoscaleOptions(read_ranges(autoscale), autoscale_interval, autoscale_window)
        options = LaunchOptions(
            model=model,
            num_prefill=prefill,
            num_decode=decode,
            num_both=both,
            send_type=send_type,
            host=host,
            port=port,
            registration_port=registration_port,
            join=join,
            key_file=key_file,
            log_dir=log_dir,
            timeout_seconds=120.0,
            vllm_args=tuple(arguments or ()),
            proxy_args=_words("--proxy-args", proxy_args),
        )
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(run_simulate(options, scaling, _console()))


@app.command()
def keygen(
    path: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")],
) -> None:
    """Make a key for a fleet. Every process with this file is a member (docs/security.md)."""
    from p2p_engine.control.fleet_key import write_key_file

    try:
        write_key_file(path)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    _console().print(f"{path}: set it as key_file of every instance and proxy", soft_wrap=True)


@app.command()
def drain(
    proxy: Annotated[
        str, typer.Option(help="HOST:PORT,... or https://HOST:PORT; a name may mean several.")
    ],
    instance: Annotated[
        str, typer.Option(help="HOST:PORT of the instance's HTTP server; HOST:PORT#RANK: one rank.")
    ],
    admin_key_file: Annotated[Path, typer.Option(help="The proxies' --admin-key-file.")],
    timeout: Annotated[float, typer.Option(min=0, help="Seconds that its requests get.")] = 300.0,
) -> None:
    """Let every proxy send an instance nothing more, and wait until its requests have ended.

    Then it may be stopped. Exit code 1 with the reason if a proxy does not say that.
    """
    from p2p_engine.cli.drain import run_drain

    try:
        key = admin_key_file.read_text().strip()
        code = run_drain(proxy, instance, key, timeout, _console())
    except (OSError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(code)


weights = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(weights, name="weights", help="Change the weights of a fleet, and name them.")
Proxies = Annotated[
    str, typer.Option("--proxy", help="HOST:PORT,... or https://HOST:PORT; the first that answers.")
]
AdminKeyFile = Annotated[Path, typer.Option(help="The proxy's --admin-key-file.")]
Model = Annotated[
    str, typer.Option(help="Whose weights, as /status shows it; needed if the proxy has several.")
]


@weights.command()
def update(
    label: Annotated[str, typer.Argument(help="The name of the new weights.")],
    proxy: Proxies,
    admin_key_file: AdminKeyFile,
    call: Annotated[
        list[str] | None,
        typer.Option(help="PATH or 'PATH JSON' of vLLM; once for each call. Default: reload."),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="Where the instances find the weights; default: where they were.")
    ] = "",
    abort: Annotated[bool, typer.Option("--abort", help="Do not let requests end.")] = False,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that requests get.")] = 300.0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that each call gets.")] = 600.0,
    model: Model = "",
) -> None:
    """Change the weights of all instances; those that then have the label get requests again.

    Exit code 1 if an instance fails: it stays paused, and is named with the reason.
    """
    from p2p_engine.cli.weights import read_calls, run_update

    if call and checkpoint:
        raise typer.BadParameter("--checkpoint is for the default call; say --call alone")
    reload: dict[str, Any] = {"method": "reload_weights"}
    if checkpoint:
        reload["kwargs"] = {"weights_path": checkpoint}
    try:
        calls = read_calls(call) if call else [{"path": "/collective_rpc", "body": reload}]
        ends = "abort" if abort else "drain"
        times = {"drain_seconds": drain, "call_seconds": timeout}
        order = {"label": label, "model": model, "calls": calls, "ends": ends, **times}
        code = run_update(proxy, admin_key_file.read_text().strip(), order, _console())
    except (OSError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(code)


@weights.command()
def label(
    label: Annotated[str, typer.Argument(help="What the weights are called from now on.")],
    proxy: Annotated[str, typer.Option(help="HOST:PORT of a proxy, for all its instances.")] = "",
    admin_key_file: Annotated[
        Path | None, typer.Option(help="The proxy's --admin-key-file.")
    ] = None,
    instance: Annotated[str, typer.Option(help="HOST:PORT,... of instances, instead.")] = "",
    model: Model = "",
) -> None:
    """Name the weights that instances have, where something else has changed them.

    Exit code 1 with the reason if one does not have the label then.
    """
    from p2p_engine.cli.weights import run_label, run_label_directly

    if bool(proxy) == bool(instance) or bool(proxy) != bool(admin_key_file):
        raise typer.BadParameter("give --proxy and --admin-key-file, or --instance")
    try:
        if admin_key_file is None:
            code = run_label_directly(instance, label, _console())
        else:
            code = run_label(proxy, admin_key_file.read_text().strip(), label, model, _console())
    except (OSError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(code)


@weights.command()
def resume(
    instance: Annotated[str, typer.Argument(help="HOST:PORT of the instance's HTTP server.")],
    proxy: Proxies,
    admin_key_file: AdminKeyFile,
) -> None:
    """Resume an instance that stayed paused, whatever label it has: you say its weights are right.

    Exit code 1 with the reason if vLLM has not resumed it.
    """
    from p2p_engine.cli.weights import run_resume

    try:
        code = run_resume(proxy, admin_key_file.read_text().strip(), instance, _console())
    except (OSError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(code)


@app.command()
def top(
    proxy: Annotated[
        str, typer.Option(help="HOST:PORT,... or https://HOST:PORT; the first that answers.")
    ] = "127.0.0.1:10001",
    count: Annotated[int, typer.Option(min=0, help="How many pictures; 0: until Ctrl-C.")] = 0,
) -> None:
    """Show a proxy's instances, pairs and last requests, live in the terminal."""
    from p2p_engine.cli.top import TopEnded, run_top

    try:
        code = run_top(proxy, count, _console())
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    except TopEnded as error:
        typer.echo(str(error), err=True)
        code = 1
    except KeyboardInterrupt:
        code = 0
    raise typer.Exit(code)


@app.command(context_settings=_PASS_ON)
def proxy(context: typer.Context) -> None:
    """Start the proxy alone; the same as `python -m proxy`."""
    try:
        from proxy.main import main
    except ModuleNotFoundError as error:
        typer.echo(f"{error}: the proxy needs pip install 'p2p-kv-engine[proxy]'", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(main(context.args))


@app.command(context_settings=_PASS_ON)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Such as transfer; options after it are its own.")],
) -> None:
    """Run one benchmark of this checkout; benchmarks/pages describes each of them."""
    from p2p_engine.cli.bench import run_bench

    if name == "--help":  # after a name, --help is the benchmark's own
        typer.echo(context.get_help())
        raise typer.Exit
    try:
        raise typer.Exit(run_bench(name, context.args))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def doctor(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE...", help="Of any kind, for --migrate.")
    ] = None,
    kv_transfer_config: TransferConfig = None,
    model: Annotated[str, typer.Option(help="A model's name or folder.")] = "",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size.")] = 1,
    gpu_memory: GpuMemory = 0.0,
    gpu_memory_utilization: GpuMemoryUtilization = 0.92,
    kv_cache_memory_bytes: KvCacheMemoryBytes = 0,
    migrate: Annotated[
        bool,
        typer.Option("--migrate", help="Only read launch files of the old connector or of NIXL's."),
    ] = False,
    pair: Annotated[
        str,
        typer.Option(
            metavar="HOST:KV_PORT,HOST:KV_PORT",
            help="Running instances, by the address in `instance ready`: would they pair?",
        ),
    ] = "",
    key_file: Annotated[str, typer.Option(help="The fleet's key, for --pair.")] = "",
) -> None:
    """Check the installation and a configuration; exit code 1 if something must change.

    With --migrate, only say by line what of launch files no longer holds, and what to write
    instead; exit code 2 if the settings of a connector that a file names are not understood. With
    --pair, only ask running instances, and name what differs.
    """
    from p2p_engine.cli.devices import find_room
    from p2p_engine.cli.doctor import run_doctor

    if migrate != bool(files):
        raise typer.BadParameter("--migrate needs files, and only --migrate takes some")
    if files:
        from p2p_engine.cli.migrate import run_migrate

        try:
            raise typer.Exit(run_migrate(files, _console()))
        except (OSError, ConfigError) as error:
            raise typer.BadParameter(str(error)) from error
    if pair:
        from p2p_engine.cli.pairing import run_pairing

        try:
            raise typer.Exit(run_pairing(pair.split(","), key_file, _console()))
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
    room = find_room(gpu_memory, gpu_memory_utilization, kv_cache_memory_bytes)
    raise typer.Exit(run_doctor(kv_transfer_config, model, tp, _console(), room))


@app.command()
def trace(
    logs: Annotated[list[Path], typer.Argument(help="Of the prefill and the decode instance.")],
    transfer_id: Annotated[str, typer.Option("--id", help="Default: the last to begin.")] = "",
) -> None:
    """Show where the time of one transfer went, stage by stage, from the instances' logs.

    The instances must log at debug level: VLLM_LOGGING_LEVEL=DEBUG, or see docs/operations.md for
    our stages alone. Times are of the host's clock: those of two hosts are as far apart as these.
    """
    from p2p_engine.cli.trace import run_trace

    try:
        run_trace(logs, transfer_id, _console())
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def size(
    model: Annotated[Path | None, typer.Option(help="A config.json, or a folder with one.")] = None,
    layers: Annotated[int, typer.Option(min=0, help="Without --model: number of layers.")] = 0,
    kv_heads: Annotated[
        int, typer.Option(min=0, help="Without --model: KV heads of all ranks.")
    ] = 0,
    head_size: Annotated[int, typer.Option(min=0, help="Without --model: elements of a head.")] = 0,
    kv_cache_dtype: Annotated[str, typer.Option(help="vLLM's setting.")] = "auto",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size.")] = 1,
    block_size: Annotated[int, typer.Option(min=1, help="vLLM's setting.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 8192,
    concurrency: Annotated[
        int, typer.Option(min=1, help="How many prompts' KV waits at one instance at a time.")
    ] = 16,
    send_type: Annotated[SendMode | None, typer.Option(help="Default: PUT_ASYNC.")] = None,
    device: Annotated[str, typer.Option(help="Where the KV cache is: cuda or cpu.")] = "cuda",
    gpu_memory: GpuMemory = 0.0,
    gpu_memory_utilization: GpuMemoryUtilization = 0.92,
    kv_cache_memory_bytes: KvCacheMemoryBytes = 0,
    kv_transfer_config: TransferConfig = None,
) -> None:
    """Compute the memory that the transfer of a model's KV takes, and the settings for it.

    The role and the connector's settings are read from --kv-transfer-config. Exit code 1: no
    setting of vLLM leaves enough room on the GPU. Needs neither vLLM nor a GPU.
    """
    from p2p_engine.cli.devices import find_room
    from p2p_engine.cli.size import Demand, Sizing, run_size
    from p2p_engine.cli.size_input import chosen_model, chosen_roles, chosen_settings

    try:
        shape = chosen_model(model, layers, kv_heads, head_size, kv_cache_dtype)
        roles = chosen_roles(kv_transfer_config)
        settings = chosen_settings(kv_transfer_config, send_type, device, tp)
        sizing = Sizing(shape, Demand(context, concurrency, tp, block_size), settings)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    room = find_room(gpu_memory, gpu_memory_utilization, kv_cache_memory_bytes)
    raise typer.Exit(run_size(sizing, roles, room, _console(), kv_transfer_config))


@app.command()
def demo(
    modes: Annotated[str, typer.Option(help="PUT_ASYNC, PUT, GET, several, or all.")] = "PUT_ASYNC",
    requests: Annotated[int, typer.Option(min=1, help="How many for each mode.")] = 60,
    seed: Annotated[int, typer.Option(help="Another seed gives other prompts.")] = 0,
    keys: Annotated[bool, typer.Option(help="Authenticate and encrypt with a new key.")] = False,
) -> None:
    """Run real vLLM with a tiny model: compare prefill and decode with a single instance.

    Exit code 1 if a token differs, or if any KV was recomputed instead of transferred.
    """
    from p2p_engine.cli.demo import DemoOptions, run_demo

    names = [mode.value for mode in SendMode]
    chosen = names if modes == "all" else modes.split(",")
    if not set(chosen) <= set(names):
        raise typer.BadParameter(f"{modes}: all, or some of {','.join(names)}")
    options = DemoOptions(modes=chosen, num_requests=requests, seed=seed, keys=keys)
    raise typer.Exit(run_demo(options, _console()))
