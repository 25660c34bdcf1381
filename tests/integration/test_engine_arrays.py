"""Engines move arrays of numpy, and on the double of a GPU those of cupy's, without a copy."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from p2p_engine import SendMode, TransferKey
from p2p_engine.config import GPU_TRANSPORTS
from p2p_engine.errors import LocalProtocolError
from tests import marks
from tests.doubles import cupy_arrays as cupy
from tests.rigs.engines import assert_idle, engines
from tests.support import eventually

KEY = TransferKey("request-1", "layers.0")
UNFIT: dict[str, tuple[Any, str]] = {
    "byte order": (np.zeros(3, ">f4"), "byte order"),
    "object": (np.array([None]), "object cannot be a torch tensor"),
    "reversed": (np.zeros(3)[::-1], "negative stride"),
    "list": ([1, 2], "not an array"),
}
UNFIT_OUTS: dict[str, tuple[Any, str]] = {
    **UNFIT,
    "read-only": (np.broadcast_to(np.float32(0), (3,)), "read-only"),
    "transposed": (np.zeros((2, 3)).T, "contiguous"),
}
pytestmark = pytest.mark.usefixtures("no_leaks")


@marks.every_host_transport
@pytest.mark.parametrize("mode", list(SendMode))
def test_numpy_arrays_cross(transport: str, mode: SendMode) -> None:
    array = np.arange(3000, dtype=np.float32).reshape(30, 100)
    with engines(2, transport, send_type=mode) as (sender, receiver):
        sender.send_tensor(KEY, array, receiver.zmq_address)
        received = receiver.recv_tensor(KEY, sender.zmq_address, timeout=10)
        assert isinstance(received, torch.Tensor)
        assert (np.from_dlpack(received) == array).all()
        assert_idle(sender, receiver)


@marks.every_host_transport
@pytest.mark.parametrize("mode", list(SendMode))
def test_numpy_arrays_are_filled(transport: str, mode: SendMode) -> None:
    array, out = np.arange(600).reshape(20, 30).T, np.zeros((30, 20), np.int64)
    array.flags.writeable = False
    with engines(2, transport, send_type=mode) as (sender, receiver):
        sender.send_tensor(KEY, array, receiver.zmq_address)
        assert receiver.recv_tensor(KEY, sender.zmq_address, timeout=10, out=out) is out
        assert (out == array).all()
        assert_idle(sender, receiver)


@pytest.mark.parametrize("name", UNFIT)
def test_an_array_that_cannot_be_sent_is_named(name: str) -> None:
    array, text = UNFIT[name]
    with engines(1) as (engine,):
        with pytest.raises(LocalProtocolError, match=text):
            engine.send_tensor(KEY, array, "127.0.0.1:1")
        assert_idle(engine)


@pytest.mark.parametrize("name", UNFIT_OUTS)
def test_an_array_that_cannot_be_filled_is_named(name: str) -> None:
    out, text = UNFIT_OUTS[name]
    with engines(1) as (engine,):
        with pytest.raises(LocalProtocolError, match=text):
            engine.recv_tensor(KEY, timeout=1, out=out)
        assert_idle(engine)


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_an_array_leaves_after_the_work_in_cupys_stream(transport: str) -> None:
    """What makes it has not run when it is sent: no old byte may leave."""
    with engines(2, transport) as (sender, receiver):
        stream, opened = cupy.cuda.Stream(non_blocking=True), threading.Event()
        array = cupy.empty(5000, cupy.uint8)
        stream.launch_host_func(opened.wait, 20)
        with stream:
            array.fill(7)
            sent = sender.send_tensor(KEY, array, receiver.zmq_address)
        eventually(lambda: receiver.stats()["live_bytes"] > 0)  # it is granted
        assert not sent.wait_released(0.3)
        opened.set()
        assert (receiver.recv_tensor(KEY, timeout=10) == 7).all()


@pytest.mark.parametrize("transport", GPU_TRANSPORTS)
def test_an_array_is_filled_after_the_work_in_cupys_stream(transport: str) -> None:
    """What still fills it with other bytes has not run when it is given as `out`."""
    with engines(2, transport) as (sender, receiver), ThreadPoolExecutor(1) as pool:
        stream, opened = cupy.cuda.Stream(non_blocking=True), threading.Event()
        out = cupy.empty(5000, cupy.uint8)
        sender.send_tensor(KEY, np.full(5000, 7, np.uint8), receiver.zmq_address)
        eventually(lambda: receiver.stats()["landed_bytes_by_place"]["buffer"] > 0)
        with stream:
            stream.launch_host_func(opened.wait, 20)
            out.fill(1)
            received = pool.submit(receiver.recv_tensor, KEY, timeout=10, out=out)
            eventually(lambda: out.consumers)
        assert receiver._parts.gpu is not None
        for _ in range(3):  # its thread has looked, and looked again
            receiver._parts.gpu.device.run(lambda: None, 5.0)
        assert not received.done()
        opened.set()
        assert received.result(10) is out
        assert (cupy.asnumpy(out) == 7).all()
