"""What tells one state of a world from another."""

from __future__ import annotations

from p2p_engine.wire.messages import Grant, decode
from tests.doubles.world import Receiving, Sending, World


def parts_of(world: World) -> list[str]:
    """Everything in a state, with sequence numbers as "#1" and "#2"."""
    chunks = [
        ("chunk", f"#{c.seq}", c.state.name, c.attempt, repr(c.shipment.ready_layers),
         round(c.resend_at - world.now, 3), repr(c.ending))
        for c in world.sender._chunks.values()
    ]  # fmt: skip
    landings = [
        ("landing", i.id[0], f"#{i.id[1]}", i.state.name, i.attempt, i.receive is not None,
         i.done_heard, i.place)
        for i in world.landings()
    ]  # fmt: skip
    jobs = [
        ("job", place, j.kind, j.epoch, f"#{j.seq}", j.state, j.moved, j.cancel_asked)
        for place, j in enumerate(world.jobs)
    ]
    streams = [
        ("stream", epoch, place, f"#{seq}", end)
        for epoch, channel in world.channels.items()
        for place, (seq, _, end) in enumerate(channel.stream)
    ]
    callers: list[Sending | Receiving] = [*world.sendings, *world.receivings]
    ends = [
        ("end", type(item).__name__, str(item.key), item.transfer.released, item.transfer.done,
         repr(item.transfer.error))
        for item in callers
    ]  # fmt: skip
    link = world.links.link
    rest = (
        "rest", world.now, world.epoch, sorted(world.sessions),
        link is not None and (link.state.name, link.channel is not None),
        len(world.breaking), sorted(world.transport.connected),
    )  # fmt: skip
    kept = [("kept", str(key), world.store.is_left((key, b))) for key, b in world.kept()]
    abandoned = [("abandoned", str(key)) for key in world.sender._abandoned]
    network = [("message", _message(to, frame)) for to, frame in world.network]
    everything = [*chunks, *landings, *jobs, *streams, *ends, *kept, *abandoned, *network, rest]
    return [repr(part) for part in everything]


def _message(to: str, frame: bytes) -> str:
    message = decode(frame)
    if isinstance(message, Grant):  # its trailer is random
        return f"{to} {message.destination_epoch} #{message.seq} {message.attempt} {message.offset}"
    return f"{to} {message!r}"
