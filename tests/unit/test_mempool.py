"""TensorMemoryPool: what goes in comes out, and wrong use harms nothing."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from mempool import PoolBlock, PoolError, PoolExhausted, StaleBlock, TensorMemoryPool, read_word

MIB = 1 << 20
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (3, 5, 7), (300, 1000)]


@pytest.fixture
def pool() -> Iterator[TensorMemoryPool]:
    with TensorMemoryPool(8 * MIB) as pool:
        yield pool
        pool.check()


def make_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Random bits: not-a-numbers and denormals too. A bool has two values only."""
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (count,), dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (left.dtype, left.shape, bits(left)) == (right.dtype, right.shape, bits(right))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_stored_is_loaded(
    pool: TensorMemoryPool, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = make_tensor(dtype, shape)
    block = pool.store_tensor(tensor)
    assert (block.dtype, block.shape) == (dtype, shape)
    assert block.nbytes == tensor.numel() * tensor.element_size()
    expected = tensor.clone()
    tensor.view(torch.uint8).zero_() if tensor.dim() else tensor.zero_()
    assert same(pool.load_tensor(block), expected)
    assert same(pool.view(block), expected)
    pool.free(block)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_tensors_are_gathered_and_scattered(
    pool: TensorMemoryPool, dtype: torch.dtype
) -> None:
    base = make_tensor(dtype, (6, 10, 4))
    strided = base.permute(2, 0, 1)[::2, :, 1::3]
    block = pool.store_tensor(strided)
    assert same(pool.load_tensor(block), strided)
    frame = make_tensor(dtype, (6, 10, 4))
    before = frame.clone()
    out = frame.permute(2, 0, 1)[::2, :, 1::3]
    assert pool.load_tensor(block, out=out) is out
    assert same(out, strided)
    assert same(frame[:, 0], before[:, 0])  # between the strides nothing was touched


@pytest.mark.parametrize(
    "lazy",
    [
        torch.randn(5, 3, dtype=torch.complex64).conj(),
        torch.randn(5, dtype=torch.complex64).conj().imag,
        torch.randn(4).expand(3, 4),
    ],
    ids=["conjugate", "negative", "expanded"],
)
def test_lazy_tensors_are_stored_by_value(pool: TensorMemoryPool, lazy: torch.Tensor) -> None:
    assert torch.equal(pool.load_tensor(pool.store_tensor(lazy)), lazy)


def test_a_lazy_out_receives_the_value(pool: TensorMemoryPool) -> None:
    tensor = torch.randn(5, dtype=torch.complex64)
    out = torch.empty(5, dtype=torch.complex64).conj()
    pool.load_tensor(pool.store_tensor(tensor), out=out)
    assert torch.equal(out, tensor)


def test_tensors_that_need_a_gradient_are_stored_without_it(pool: TensorMemoryPool) -> None:
    tensor = torch.randn(4, requires_grad=True)
    loaded = pool.load_tensor(pool.store_tensor(tensor))
    assert torch.equal(loaded, tensor)
    assert not loaded.requires_grad


@pytest.mark.parametrize(
    "out",
    [torch.empty(3, 4, dtype=torch.float64), torch.empty(4, 3), torch.empty(12), torch.empty(3, 1)],
    ids=["dtype", "transposed", "flat", "broadcastable"],
)
def test_an_out_that_does_not_match_is_refused(pool: TensorMemoryPool, out: torch.Tensor) -> None:
    block = pool.store_tensor(torch.randn(3, 4))
    with pytest.raises(ValueError, match="the block holds"):
        pool.load_tensor(block, out=out)


def test_tensors_that_are_more_than_their_bytes_are_refused(pool: TensorMemoryPool) -> None:
    with pytest.raises(TypeError, match="more than its bytes"):
        pool.store_tensor(torch.eye(3).to_sparse())
    assert pool.stats().num_blocks == 0


def test_a_store_that_fails_gives_its_memory_back(pool: TensorMemoryPool) -> None:
    with pytest.raises((NotImplementedError, RuntimeError)):
        pool.store_tensor(torch.empty(4, device="meta"))
    assert pool.stats().num_blocks == 0


def test_a_view_is_the_memory_itself(pool: TensorMemoryPool) -> None:
    block = pool.store_tensor(torch.zeros(4, dtype=torch.int64))
    view = pool.view(block)
    assert view.data_ptr() == pool.address(block)
    view[0] = 5
    assert read_word(pool.address(block)) == 5
    assert pool.load_tensor(block).tolist() == [5, 0, 0, 0]


def test_raw_blocks_are_bytes(pool: TensorMemoryPool) -> None:
    block = pool.allocate(1000)
    assert (block.nbytes, block.dtype, block.shape) == (1000, None, (1000,))
    pool.view(block).fill_(7)
    assert pool.load_tensor(block).tolist() == [7] * 1000
    empty = pool.allocate(0)
    assert pool.address(empty) == pool.address(block) + 1024
    assert pool.view(empty).numel() == 0


def test_rounding_costs_less_than_a_block_per_tensor(pool: TensorMemoryPool) -> None:
    for nbytes in range(1, 5000, 97):
        pool.allocate(nbytes)
        stats = pool.stats()
        assert stats.used_bytes - stats.requested_bytes < 512 * stats.num_blocks


def test_a_full_pool_says_what_would_fit(pool: TensorMemoryPool) -> None:
    pool.allocate(8 * MIB - 1024)
    with pytest.raises(PoolExhausted, match="no room for 4096 bytes, 1024 would fit"):
        pool.store_tensor(torch.zeros(1024))
    pool.store_tensor(torch.zeros(256))


@pytest.mark.parametrize("operation", ["free", "view", "load_tensor", "address"])
def test_a_freed_block_is_stale_even_when_its_place_is_taken(
    pool: TensorMemoryPool, operation: str
) -> None:
    block = pool.store_tensor(torch.zeros(4))
    pool.free(block)
    successor = pool.store_tensor(torch.ones(4))
    with pytest.raises(StaleBlock, match="freed before"):
        getattr(pool, operation)(block)
    assert pool.load_tensor(successor).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("operation", ["free", "view", "load_tensor", "address"])
def test_another_pools_block_is_stale(pool: TensorMemoryPool, operation: str) -> None:
    with TensorMemoryPool(MIB) as other:
        foreign = other.store_tensor(torch.zeros(4))
        ours = pool.store_tensor(torch.ones(4))
        with pytest.raises(StaleBlock, match="another pool"):
            getattr(pool, operation)(foreign)
        assert other.load_tensor(foreign).tolist() == [0, 0, 0, 0]
        assert pool.load_tensor(ours).tolist() == [1, 1, 1, 1]


def test_a_block_freed_during_a_load_makes_the_load_fail(
    pool: TensorMemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = pool.store_tensor(torch.zeros(4))

    def free_then_copy(*_: object) -> None:
        pool.free(block)

    monkeypatch.setattr("mempool.tensors.pool.copy_now", free_then_copy)
    with pytest.raises(StaleBlock):
        pool.load_tensor(block)


def test_a_closed_pool_refuses_everything() -> None:
    pool = TensorMemoryPool(MIB)
    block = pool.store_tensor(torch.zeros(4))
    pool.close()
    pool.close()
    for use in (
        lambda: pool.store_tensor(torch.zeros(4)),
        lambda: pool.allocate(1),
        lambda: pool.load_tensor(block),
        lambda: pool.free(block),
    ):
        with pytest.raises(PoolError, match="closed"):
            use()


@pytest.mark.usefixtures("no_leaks")
def test_close_gives_the_memory_back_unless_it_is_viewed() -> None:
    pool = TensorMemoryPool(MIB)
    view = pool.view(pool.store_tensor(torch.arange(4)))
    pool.close()
    assert view.tolist() == [0, 1, 2, 3]


def test_a_block_does_not_keep_its_pool() -> None:
    pool = TensorMemoryPool(MIB)
    block = pool.store_tensor(torch.zeros(4))
    watch = weakref.ref(pool)
    del pool
    gc.collect()
    assert watch() is None
    assert block.nbytes == 16


@pytest.mark.parametrize(("capacity", "min_block"), [(0, 512), (511, 512), (MIB, 500), (MIB, 32)])
def test_sizes_that_make_no_sense_are_refused(capacity: int, min_block: int) -> None:
    with pytest.raises(ValueError, match="min_block_bytes"):
        TensorMemoryPool(capacity, min_block)


def test_the_report_tells_how_the_memory_was_set_up(pool: TensorMemoryPool) -> None:
    assert pool.report()["page_lock"] == "off"
    with TensorMemoryPool(MIB, page_lock=True, cuda_register=True) as other:
        assert other.report()["page_lock"] != "off"
        assert other.report()["cuda_register"] != "off"


def test_a_handle_shows_what_it_holds(pool: TensorMemoryPool) -> None:
    block = pool.store_tensor(torch.zeros(2, 3))
    assert repr(block) == "PoolBlock(nbytes=24, dtype=torch.float32, shape=(2, 3))"
    with pytest.raises(AttributeError):
        block.nbytes = 5  # type: ignore[misc]
    assert block != pool.store_tensor(torch.zeros(2, 3))


def test_threads_may_share_a_pool(pool: TensorMemoryPool) -> None:
    failures: list[BaseException] = []

    def churn(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        live: list[tuple[PoolBlock, torch.Tensor]] = []
        try:
            for _ in range(150):
                count = int(torch.randint(0, 5000, (), generator=generator))
                tensor = torch.randint(0, 1 << 30, (count,), generator=generator)
                live.append((pool.store_tensor(tensor), tensor))
                if len(live) > 10:
                    block, expected = live.pop(count % 10)
                    assert torch.equal(pool.load_tensor(block), expected)
                    pool.free(block)
            for block, expected in live:
                assert torch.equal(pool.load_tensor(block), expected)
                pool.free(block)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not failures
    assert pool.stats().num_blocks == 0
