"""The messages: typed MessagePack structs, their limits, and the protocol version.

The codec refuses unknown tags, wrong types and values out of bounds. Nothing here does I/O.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from p2p_engine.errors import LocalProtocolError, RemoteProtocolError

# Up to 8, engines compared no identity. Proxies pair neighbours, so nobody has said 9.
PROTOCOL_VERSION = 10
OLDEST_VERSION = 9  # that an engine of this version speaks, too
MAX_FRAME_BYTES = 1 << 16
MAX_LAYERS = 1 << 10
MAX_REASON = 500  # characters of a reason; fewer than a Text holds
MAX_RANKS = 1 << 10
MAX_GROUPS = 1 << 6
MAX_MARKS = 1 << 6  # at which a stash can be cut
MAX_IDENTITY_BYTES = 48 << 10
MAX_RENEWED = 1 << 10  # contents in one RENEW; fewer if their names are long

Text = Annotated[str, msgspec.Meta(max_length=512)]
Blob = Annotated[bytes, msgspec.Meta(max_length=64)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Offset = Annotated[int, msgspec.Meta(ge=-(1 << 48), le=1 << 48)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=86400.0)]


class TransferKey(msgspec.Struct, frozen=True, array_like=True):
    """The name of a transfer. It comes from the proxy's id, never from an engine's own request
    id."""

    transfer_id: Text
    layer: Text = ""
    prompt_index: Count = 0
    child_index: Count = 0
    group: Count = 0  # of layers that share a block table

    def __str__(self) -> str:
        """Show the key as in log lines."""
        part = f"group {self.group}" if self.group else self.layer
        return f"{self.transfer_id}/{self.prompt_index}/{self.child_index}/{part}"


ContentKey: TypeAlias = tuple[TransferKey, bytes]  # name and binding: never two contents


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """The position of K, of V, or of MLA's latent vector in a page.

    Row r of token t of head h has `row_bytes` bytes at offset + h * PageShape.head_stride + t *
    token_stride + r * row_stride.
    """

    offset: Offset
    token_stride: Offset
    row_bytes: Bytes
    num_rows: Count = 1
    row_stride: Offset = 0


class PageShape(msgspec.Struct, frozen=True, array_like=True):
    """How the bytes of one block of one layer are arranged; the same for all layers of a rank.

    `num_tokens` is the number of tokens that can be addressed singly: 1 if only whole blocks can.
    """

    num_tokens: Count
    head_stride: Offset
    planes: Annotated[tuple[Plane, ...], msgspec.Meta(min_length=1, max_length=4)]

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Return (rows, bytes of a row) for each plane. The shapes of two peers must agree in
        this."""
        return [(plane.num_rows, plane.row_bytes) for plane in self.planes]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The part of a cache that one rank sends to a rank with other layers, heads or blocks.

    Layers and heads are numbered as in the model. Only layers that keep a cache in the part's group
    count. The byte stream goes layer by layer; in a layer, for each `block_size` tokens, the rows
    follow in the order of the source's page, which has `shape`.
    """

    first_layer: Count
    num_layers: Count
    first_head: Count
    num_heads: Count
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    shape: PageShape

    def overlaps(self, other: Part) -> bool:
        """Whether two parts share a head of a layer."""
        return (
            self.first_layer < other.first_layer + other.num_layers
            and other.first_layer < self.first_layer + self.num_layers
            and self.first_head < other.first_head + other.num_heads
            and other.first_head < self.first_head + self.num_heads
        )


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """The geometry of a chunk. Its byte stream is, layer by layer, the pages of its blocks.

    `page_bytes[l]` is the size in bytes of one block of layer `first_layer` + l, counted from the
    first layer of this rank. A plain tensor is one layer of one block, with `dtype` and `shape`
    set. With a `part`, blocks are those of the part, and layers are counted from its first one.
    """

    first_block: Count
    num_blocks: Count
    page_bytes: Annotated[list[Bytes], msgspec.Meta(max_length=MAX_LAYERS)]
    num_tokens: Count = 0
    dtype: Annotated[str, msgspec.Meta(max_length=32)] = ""
    shape: Annotated[list[Bytes], msgspec.Meta(max_length=16)] = []
    part: Part | None = None
    first_layer: Count = 0

    @property
    def end_layer(self) -> int:
        """Return the end of its layers."""
        return self.first_layer + len(self.page_bytes)

    @property
    def num_pages(self) -> int:
        """Return the number of its pages; a chunk without layers counts as one of one layer."""
        return self.num_blocks * max(1, len(self.page_bytes))

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block over all layers."""
        return sum(self.page_bytes)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole chunk."""
        return self.num_blocks * self.block_bytes

    def narrowed(self, first_block: int, num_blocks: int) -> Manifest:
        """Return the manifest of these blocks of the chunk."""
        return msgspec.structs.replace(self, first_block=first_block, num_blocks=num_blocks)

    def in_layers(self, first: int, end: int) -> Manifest:
        """Return the manifest of its layers first, first + 1, ... end - 1, counted from its first
        one."""
        return msgspec.structs.replace(
            self, page_bytes=self.page_bytes[first:end], first_layer=self.first_layer + first
        )

    def overlaps(self, other: Manifest) -> bool:
        """Whether two chunks have a byte of the cache in common, or might have."""
        if self.part is None or other.part is None:
            mine = theirs = 1
            if self.part is not other.part:
                return True  # the peer has changed: positions cannot be compared
        else:
            if not self.part.overlaps(other.part):
                return False
            mine, theirs = self.part.block_size, other.part.block_size
        if self.part == other.part and not self.shares_layers(other):
            return False
        return (
            self.first_block * mine < (other.first_block + other.num_blocks) * theirs
            and other.first_block * theirs < (self.first_block + self.num_blocks) * mine
        )

    def shares_layers(self, other: Manifest) -> bool:
        """Whether two chunks of one part have a layer in common."""
        return self.first_layer < other.end_layer and other.first_layer < self.end_layer


class CacheSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A group of layers in one rank's KV cache, and how the ranks of its instance share the model.

    `layer_cuts` are the first layer of each pipeline stage, and the end; rank r is the tensor
    parallel rank r % tp_size of stage r // tp_size. `layers` are those of this rank that keep a
    cache in this group, in the order of `page_bytes`; None stands for all of its stage. If
    `page_bytes` is empty, the bytes of a block are not contiguous. If `shape` is None, the layout
    inside a block is unknown. `more` are the rank's other groups in the order of their numbers,
    those of a draft model last. `identity` is the digest of all else that decides the KV of a
    prompt (wire/identity.py).
    """

    identity: Blob = b""
    dtype: Text = ""
    block_size: Count = 0
    num_kv_heads: Count = 0  # of the model
    head_size: Count = 0
    layout: Text = ""
    packing: Text = ""
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    layer_cuts: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    rank: Count = 0
    page_bytes: Annotated[list[Bytes], msgspec.Meta(max_length=MAX_LAYERS)] = []
    shape: PageShape | None = None
    layers: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_LAYERS)] | None = None
    window: Count = 0  # number of past tokens that its layers attend to; 0: all
    number: Count = 0  # of the group
    is_draft: bool = False  # layers of a draft model, which its peers may lack
    more: Annotated[tuple[CacheSpec, ...], msgspec.Meta(max_length=MAX_GROUPS)] = ()

    def __post_init__(self) -> None:
        """Refuse nested groups: one byte on the wire could become half a KiB here."""
        if any(group.more for group in self.more):
            raise ValueError("a group of layers has no groups of its own")

    @property
    def groups(self) -> tuple[CacheSpec, ...]:
        """Return all groups of the rank."""
        return (self, *self.more)

    def group(self, number: int) -> CacheSpec:
        """Return a group by its number; for an unknown number, the first group."""
        return self.groups[number] if number < len(self.groups) else self

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the instance."""
        return self.tp_size * max(1, len(self.layer_cuts) - 1)

    @property
    def has_ranks(self) -> bool:
        """Whether the spec says how the ranks share the model."""
        return len(self.layer_cuts) > 1 and self.num_kv_heads > 0


class Message(msgspec.Struct, array_like=True, tag_field="type"):
    """The fields of every message: the epochs of the engines that sent it and that it is for."""

    source_epoch: U64
    destination_epoch: U64


class Hello(Message, tag="HELLO"):
    """The first message of a link.

    `endpoints` is empty; it keeps its place so that engines of other protocol versions can read a
    HELLO and refuse it by name. The sender recognises its own HELLO by `number`, which nobody else
    knows (0: it has none).
    """

    version: Count
    address: Text
    spec: CacheSpec | None
    endpoints: Annotated[dict[Text, dict[Text, Text]], msgspec.Meta(max_length=8)]
    number: U64 = 0


class Welcome(Message, tag="WELCOME"):
    """Answer to HELLO: accepted.

    It has the endpoints of the receiver's transports with their tokens, whether every chunk needs a
    checksum, the most bytes that can ever land at once (0: no limit), and the lease in seconds of a
    hold or an offer without RENEW.
    """

    version: Count
    spec: CacheSpec | None
    endpoints: Annotated[dict[Text, dict[Text, Text]], msgspec.Meta(max_length=8)]
    checksum: bool = False
    largest_landing: Bytes = 0
    lease: Seconds = 60.0


class Refuse(Message, tag="REFUSE"):
    """Answer to HELLO: refused, with the reason."""

    version: Count
    reason: Text


class Greet(Message, tag="GREET"):
    """I do not know you (any more): say HELLO first. Open transfers stay open."""


class Ping(Message, tag="PING"):
    """Are you alive? The peer answers PONG. A `number` asks whether the peer said that HELLO."""

    number: U64 = 0


class Pong(Message, tag="PONG"):
    """Answer to PING; it has PING's `number` if the HELLO was said here."""

    number: U64 = 0


class Bye(Message, tag="BYE"):
    """The sender is closing: end everything that is open with it now."""


class Lookup(Message, tag="LOOKUP"):
    """To an instance's directory: at which address is this rank?"""

    rank: Count


class Location(Message, tag="LOCATION"):
    """The directory's answer; an empty address means that there is no such rank.

    `spec` describes one rank. Its fields about the instance hold for all ranks. `identity` are the
    fields of which the spec has the digest (wire/identity.py), so that a refusal can name those
    that differ.
    """

    rank: Count
    address: Text
    num_ranks: Count
    spec: CacheSpec | None
    identity: Annotated[bytes, msgspec.Meta(max_length=MAX_IDENTITY_BYTES)] = b""


class Recall(Message, tag="RECALL"):
    """To an instance's directory: which beginnings of this key's KV are stashed there?"""

    key: TransferKey


class Stashed(Message, tag="STASHED"):
    """The directory's answer: the lengths of the beginnings, in tokens, with the binding of each;
    none if nothing is stashed."""

    key: TransferKey
    marks: Annotated[list[tuple[Count, Blob]], msgspec.Meta(max_length=MAX_MARKS)]


class Offer(Message, tag="OFFER"):
    """Please reserve a region for this chunk. Repeated until answered.

    Chunks of one attempt to send a key have the same `generation`, and those of a later attempt a
    higher one (0: the sender does not say). It `answers` the WANT that has this `attempt` (0: it is
    pushed, or the sender does not say).
    """

    seq: U64
    attempt: Count
    key: TransferKey
    manifest: Manifest
    binding: Blob
    transport: Text
    checksum: bool = False  # DONE will have a checksum
    generation: U64 = 0
    answers: U64 = 0


class Grant(Message, tag="GRANT"):
    """The region is reserved. Only the blocks [first_block, first_block + num_blocks) are
    wanted."""

    seq: U64
    attempt: Count
    first_block: Count
    num_blocks: Count
    offset: Bytes
    trailer: U64
    word_offset: Bytes = 0  # of the completion word in the peer's host memory; 0: no word


class Deny(Message, tag="DENY"):
    """No room now: offer again after `retry_after` seconds."""

    seq: U64
    attempt: Count
    reason: Text
    retry_after: Seconds


class Done(Message, tag="DONE"):
    """All bytes are written, with this CRC-32C if one was agreed on. Repeated until answered."""

    seq: U64
    attempt: Count
    checksum: U32 = 0


class Commit(Message, tag="COMMIT"):
    """The chunk has landed whole."""

    seq: U64
    attempt: Count


class Fail(Message, tag="FAIL"):
    """The receiver will never take this chunk; `code` is the name of the error class."""

    seq: U64
    attempt: Count
    code: Text
    reason: Text


class Cancel(Message, tag="CANCEL"):
    """The receiver asks the sender to stop. Repeated until CANCELLED comes."""

    seq: U64
    attempt: Count


class Cancelled(Message, tag="CANCELLED"):
    """The sender will not write to this attempt's region any more."""

    seq: U64
    attempt: Count


class Abandon(Message, tag="ABANDON"):
    """The sender will not complete this content, in attempts up to this `generation` (see OFFER).
    Repeated until ABANDON_OK comes."""

    key: TransferKey
    reason: Text
    generation: U64
    binding: Blob


class AbandonOk(Message, tag="ABANDON_OK"):
    """Answer to ABANDON of attempts up to this `generation`: noted."""

    key: TransferKey
    binding: Blob
    generation: U64


class Want(Message, tag="WANT"):
    """Offer me this key now. Repeated until OFFER or GONE comes.

    With GET, the holder remembers a key that it does not know yet. If the key `is_pushed`, it need
    not: the push comes by itself. If the holder's instance has said that it has it (`is_promised`),
    and it does not, it will not have it later. What is on its way for another `attempt`, a number
    of the receive that asks and higher for a later one, is stopped and sent again: that receive may
    have taken a part of it.
    """

    key: TransferKey
    binding: Blob
    is_pushed: bool = False
    is_promised: bool = False
    attempt: U64 = 0


class Renew(Message, tag="RENEW"):
    """Requests will ask for these contents: keep your holds or offers of them for another lease.

    GONE answers for each key that will never come; the other keys get no answer. Without contents,
    requests that the sender does not know yet may ask for any, and GONE answers for none.
    """

    contents: Annotated[list[tuple[TransferKey, Blob]], msgspec.Meta(max_length=MAX_RENEWED)]


class Gone(Message, tag="GONE"):
    """Answer to WANT and RENEW: this content will not come from here, or not again, in attempts up
    to this `generation` (see OFFER)."""

    key: TransferKey
    reason: Text
    generation: U64
    binding: Blob


class Release(Message, tag="RELEASE"):
    """With GET: the holder may free this key."""

    key: TransferKey
    binding: Blob


AnyMessage: TypeAlias = (
    Hello | Welcome | Refuse | Greet | Ping | Pong | Bye | Lookup | Location | Recall | Stashed
    | Offer | Grant | Deny | Done | Commit | Fail | Cancel | Cancelled | Abandon | AbandonOk | Want
    | Renew | Gone | Release
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Encode one message."""
    return _encoder.encode(message)


def decode(frame: bytes) -> AnyMessage:
    """Decode one frame.

    Raises:
        RemoteProtocolError: it is too long, not MessagePack, of unknown type or out of bounds.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES}")
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"bad frame of {len(frame)} bytes: {error}") from error


def check_fits(message: AnyMessage) -> None:
    """Check that a peer can decode a message made from our caller's values.

    Raises:
        LocalProtocolError: a value is too long, too large or not text.
    """
    try:
        decode(encode(message))
    except (RemoteProtocolError, TypeError, ValueError, OverflowError) as error:
        kind, why = type(message).__name__.upper(), error.__cause__ or error
        raise LocalProtocolError(f"the wire cannot carry this {kind}: {why}") from error


def understand_each_other(one: int | None, other: int | None) -> bool:
    """Whether engines of these protocol versions work together: each speaks its own version and the
    one before. None stands for the old wire."""
    if one is None or other is None:
        return one is other
    return one == other or (abs(one - other) == 1 and min(one, other) >= OLDEST_VERSION)


def shorten(reason: str) -> str:
    """Shorten a reason to what a message can carry, and replace what UTF-8 cannot encode."""
    return reason[:MAX_REASON].encode(errors="replace").decode()


class Publisher(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where vLLM's scheduler publishes its KV events: ports of the host of `zmq_address`."""

    port: Port
    replay_port: Port | None = None  # None: what was missed cannot be had again
    topic: Text = ""


class Heartbeat(msgspec.Struct, omit_defaults=True):
    """An instance's report to the proxy, every `interval` seconds.

    The first three keys are those of the old wire. `protocol` is absent if an instance speaks only
    that.
    """

    type: Text
    http_address: Text
    zmq_address: Text
    protocol: Count | None = None
    epoch: U64 = 0
    model: Text = ""
    tp_size: Count = 1
    send_type: Text = ""
    interval: Seconds = 3.0
    leaving: bool = False
    relayed: bool = False  # by another proxy
    kv_bytes_per_token: Count = 0  # over all ranks; 0: unknown
    dp_rank: Count | None = None  # one of several data-parallel ranks behind one HTTP address
    events: Publisher | None = None
    # It keeps the KV of prompts it has seen, and asks for what prefill holds back of the next one.
    has_prefix_cache: bool = False
    warning: Text = ""  # what is wrong there, for the proxy's status
    accept_differences: Text = ""  # fields of the identity that its peers need not share
    weights: Text = ""  # their name, as in bindings; "": it does not say
    # Since its start, its workers have run a method that may change weights, or took a label.
    weights_changed: bool = False


_heartbeat_decoder = msgspec.msgpack.Decoder(Heartbeat)


def encode_heartbeat(heartbeat: Heartbeat) -> bytes:
    """Encode a heartbeat as a MessagePack map."""
    return _encoder.encode(heartbeat)


def decode_heartbeat(frame: bytes) -> Heartbeat:
    """Decode a heartbeat; unknown keys are ignored.

    Raises:
        RemoteProtocolError: it is not a heartbeat.
    """
    try:
        return _heartbeat_decoder.decode(frame[:MAX_FRAME_BYTES])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"bad heartbeat of {len(frame)} bytes: {error}") from error
