"""BlockIndex: which blocks of tokens lie on which instance, as their KV events say; pure.

A block has a key of ours: a hash of all tokens up to its end, and of what else its KV was computed
under (`extra_keys`: LoRA adapter, cache salt, media). Holders of a key are the bits of one integer,
so a prompt is looked up once for all instances.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

# About 250 bytes each, over all instances; each may have the same share of them.
MAX_BLOCKS = 1 << 21
# A promise is believed for one to two of these. Events of a chosen instance come when it has
# computed the prompt; others with the same prefix arrive earlier.
PROMISE_SECONDS = 10.0
MAX_PROMISED = 1 << 19
MAX_EVENT_BLOCKS = 1 << 12  # an event of more is taken for several
# Of one prompt, whole blocks that are looked up, and the block sizes for which that is done.
MAX_CHAIN = 1 << 14
MAX_SIZES = 4
_ROOT = 0
# Where a hit needs all blocks of the prefix. A window's blocks say nothing of the prefix before it.
_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")

BlockName: TypeAlias = bytes | int  # vLLM's hash of a block
Keys: TypeAlias = list[int]


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that now lie in the cache, one after another behind their parent."""

    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None

    def has_all(self, num_blocks: int) -> bool:
        """Tell whether it has the tokens and the extra keys of so many blocks."""
        num_extras = len(self.extra_keys or ()) or num_blocks
        return (len(self.token_ids), num_extras) == (self.block_size * num_blocks, num_blocks)


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks of which one copy each is gone."""

    block_hashes: list[BlockName]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing is left."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _EventKind(msgspec.Struct):
    type: str


class _Batch(msgspec.Struct, array_like=True):
    time: float
    events: list[msgspec.Raw]


_KNOWN = {kind.__name__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
_batch_decoder = msgspec.msgpack.Decoder(_Batch)
_event_decoder: msgspec.msgpack.Decoder[CacheEvent] = msgspec.msgpack.Decoder(CacheEvent)
_kind_decoder = msgspec.msgpack.Decoder(_EventKind)


def read_events(payload: bytes) -> Iterator[CacheEvent]:
    """Read the events of a batch one by one, none of more than `MAX_EVENT_BLOCKS` blocks; kinds
    that are not known yet are left out.

    Raises:
        msgspec.MsgspecError: it is no batch, or an event of a known kind cannot be read.
    """
    for event in _batch_decoder.decode(payload).events:
        if _kind_decoder.decode(event).type in _KNOWN:
            yield from _parts(_event_decoder.decode(event))


def _parts(event: CacheEvent) -> Iterator[CacheEvent]:
    """Cut an event of many blocks into events that mean the same."""
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= MAX_EVENT_BLOCKS:
        yield event
        return
    blocks = event.block_hashes
    for first in range(0, len(blocks), MAX_EVENT_BLOCKS):
        end = first + MAX_EVENT_BLOCKS
        part = msgspec.structs.replace(event, block_hashes=blocks[first:end])
        if isinstance(part, BlockStored):
            if not part.has_all(len(blocks)):
                return
            size = part.block_size
            part.token_ids = part.token_ids[first * size : end * size]
            part.extra_keys = part.extra_keys and part.extra_keys[first:end]
            part.parent_block_hash = blocks[first - 1] if first else part.parent_block_hash
        yield part


class _Holder:
    """What one instance holds. `keys` has our key of each block, by vLLM's name; `copies` how many
    more blocks have the same name: vLLM keeps equal ones that were computed at the same time.
    `is_whole`: it holds nothing else. `promised` has the keys of which it is promised that it will,
    the newest first."""

    def __init__(self, bit: int, *, is_whole: bool) -> None:
        self.bit = bit
        self.is_whole = is_whole
        self.keys: dict[int, int] = {}
        self.copies: Counter[int] = Counter()
        self.promised: list[set[int]] = [set(), set()]
        self.block_size = 0
        self.group: int | None = None


class BlockIndex:
    """All instances and their blocks. Invariant: num_blocks <= max_blocks."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[int, _Holder] = {}
        self._bits: dict[int, int] = {}  # who holds a key
        self._promised: list[dict[int, int]] = [{}, {}]  # to whom, as `_Holder.promised`

    def counts(self) -> dict[int, int]:
        """Return the number of blocks of each instance whose events are heard."""
        return {number: len(item.keys) for number, item in self._holders.items()}

    def partial(self) -> list[int]:
        """Return the instances that may hold more than is known, since before their first event."""
        return [number for number, item in self._holders.items() if not item.is_whole]

    def begin(self, instance: int, *, is_whole: bool = True) -> None:
        """Believe an instance from now on, with nothing in its cache; again: forget what it had.
        `is_whole`: it really holds nothing by now."""
        self.end(instance)
        taken = sum(item.bit for item in self._holders.values())
        self._holders[instance] = _Holder(~taken & (taken + 1), is_whole=is_whole)
        for other in self._holders.values():
            for block in list(other.keys)[self._share :]:  # none of the rest stands on these
                self._remove(other, block, is_whole=True)

    def end(self, instance: int) -> None:
        """Forget an instance and all its blocks; idempotent."""
        holder = self._holders.pop(instance, None)
        if holder is not None:
            self._clear(holder)

    def apply(self, instance: int, events: Iterable[CacheEvent]) -> None:
        """Follow the events of an instance that has begun, in their order."""
        holder = self._holders[instance]
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._clear(holder)
                holder.is_whole = True
            elif event.medium not in (None, "GPU") or event.locality not in (None, "LOCAL"):
                continue
            elif isinstance(event, BlockStored):
                self._store(holder, event)
            elif event.group_idx == holder.group:
                for block in event.block_hashes:
                    self._remove(holder, _short(block))

    def keys_of(self, tokens: Sequence[int], lora: str, salt: str) -> dict[int, Keys]:
        """Return the keys of a prompt's whole blocks, for each block size that an instance has, the
        most common one first."""
        counted = Counter(item.block_size for item in self._holders.values() if item.block_size)
        sizes = [size for size, _ in counted.most_common(MAX_SIZES)]
        extras = _extra(lora, [salt] if salt else []), _extra(lora, [])
        return {size: _chain(tokens, size, *extras) for size in sizes}

    def match(self, keys: dict[int, Keys]) -> dict[int, int]:
        """Return how many leading tokens each instance holds, or is promised to hold soon; without
        instances whose events are not heard."""
        held = dict.fromkeys(self._holders, 0)
        sizes = {n: _size_of(item, keys) for n, item in self._holders.items()}
        for size, chain in keys.items():
            alive = {self._holders[n].bit: n for n, its in sizes.items() if its == size}
            mask = sum(alive)
            for num_before, key in enumerate(chain):
                now = mask & self._believed(key)
                if now != mask:
                    for bit in [bit for bit in alive if not now & bit]:
                        held[alive.pop(bit)] = num_before * size
                mask = now
                if not mask:
                    break
            held |= dict.fromkeys(alive.values(), len(chain) * size)
        return held

    def promise(self, instance: int, keys: dict[int, Keys]) -> None:
        """Believe for a while that an instance holds these blocks: it was asked to compute them."""
        holder = self._holders.get(instance)
        if holder is None:
            return
        newest = self._promised[0]
        for key in keys.get(_size_of(holder, keys), ()):
            newest[key] = newest.get(key, 0) | holder.bit
            holder.promised[0].add(key)
        if sum(len(item.promised[0]) for item in self._holders.values()) > MAX_PROMISED:
            self.age()

    def age(self) -> None:
        """Forget the older half of the promises; call it each `PROMISE_SECONDS`."""
        self._promised = [{}, self._promised[0]]
        for item in self._holders.values():
            item.promised = [set(), item.promised[0]]

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken; walks everything."""
        bits: dict[int, int] = {}
        for item in self._holders.values():
            for key in item.keys.values():
                bits[key] = bits.get(key, 0) | item.bit
            assert item.copies.keys() <= item.keys.keys()
            assert len(item.keys) <= self._share
        assert bits == self._bits
        for number, promised in enumerate(self._promised):
            promised_bits: dict[int, int] = {}
            for item in self._holders.values():
                for key in item.promised[number]:
                    promised_bits[key] = promised_bits.get(key, 0) | item.bit
            assert promised_bits == promised

    @property
    def _share(self) -> int:
        return self._max_blocks // max(1, len(self._holders))

    def _believed(self, key: int) -> int:
        newer, older = self._promised
        return self._bits.get(key, 0) | newer.get(key, 0) | older.get(key, 0)

    def _store(self, holder: _Holder, event: BlockStored) -> None:
        """Note blocks, as long as all that lies before them is known and there is room."""
        if event.kv_cache_spec_kind not in _KINDS or event.block_size < 1:
            return
        is_first = event.parent_block_hash is None and event.group_idx == holder.group
        if is_first and 0 < holder.block_size < event.block_size:
            self._clear(holder)  # what came until now were parts of blocks, which vLLM names, too
        if not holder.block_size:
            holder.block_size, holder.group = event.block_size, event.group_idx
        size, blocks = event.block_size, event.block_hashes
        extras, lora = event.extra_keys or [None] * len(blocks), event.lora_name or ""
        is_ours = (holder.block_size, holder.group) == (size, event.group_idx)
        if not is_ours or not event.has_all(len(blocks)):
            return
        parent: int | None = _ROOT
        if event.parent_block_hash is not None:
            parent = holder.keys.get(_short(event.parent_block_hash))
        for number, (block, extra) in enumerate(zip(blocks, extras, strict=True)):
            if parent is None:
                return
            tokens = event.token_ids[number * size : (number + 1) * size]
            parent = self._add(
                holder, _short(block), _key(parent, tokens, _extra(lora, _others(lora, extra)))
            )

    def _add(self, holder: _Holder, block: int, key: int) -> int | None:
        known = holder.keys.get(block)
        if known is not None:
            holder.copies[block] += 1
            return known
        # Adapters of one name may differ in what only vLLM's name of the block tells.
        is_double = self._bits.get(key, 0) & holder.bit
        if is_double or len(holder.keys) >= self._share:
            return None
        holder.keys[block] = key
        self._bits[key] = self._bits.get(key, 0) | holder.bit
        return key

    def _remove(self, holder: _Holder, block: int, *, is_whole: bool = False) -> None:
        if holder.copies.get(block, 0) > 0 and not is_whole:
            holder.copies[block] -= 1
            return
        holder.copies.pop(block, None)
        key = holder.keys.pop(block, None)
        if key is not None:
            _unset(self._bits, key, holder.bit)

    def _clear(self, holder: _Holder) -> None:
        """Forget the blocks of an instance, and what was promised of it."""
        for block in list(holder.keys):
            self._remove(holder, block, is_whole=True)
        for promised, keys in zip(self._promised, holder.promised, strict=True):
            for key in keys:
                _unset(promised, key, holder.bit)
            keys.clear()
        holder.block_size, holder.group = 0, None


def _unset(bits: dict[int, int], key: int, bit: int) -> None:
    left = bits.get(key, 0) & ~bit
    if left:
        bits[key] = left
    else:
        bits.pop(key, None)


def _size_of(holder: _Holder, keys: dict[int, Keys]) -> int:
    """Return an instance's block size; before it has a block, that of most others."""
    return holder.block_size or next(iter(keys), 0)


def _short(block: BlockName) -> int:
    """Return a name of eight bytes: that two blocks get the same is next to impossible."""
    return hash(block)


def _others(lora: str, extra: Sequence[Any] | None) -> Sequence[Any]:
    """Return vLLM's extra keys of a block without the adapter, which is the first if there is
    one."""
    extra = extra or ()
    return extra[1:] if lora and extra and extra[0] == lora else extra


def _extra(lora: str, others: Sequence[Any]) -> bytes:
    """Return what a block's KV was computed under; the adapter apart, as a salt may be called the
    same."""
    return msgspec.msgpack.encode([lora, *others]) if lora or others else b""


def _key(parent: int, tokens: Sequence[int], extra: bytes) -> int:
    return hash((parent, extra, *tokens))


def _chain(tokens: Sequence[int], size: int, first: bytes, rest: bytes) -> Keys:
    keys, parent = [], _ROOT
    for end in range(size, min(len(tokens), size * MAX_CHAIN) + 1, size):
        parent = _key(parent, tokens[end - size : end], first if end == size else rest)
        keys.append(parent)
    return keys
