"""What a pool raises.

PoolError
├─ PoolExhausted   nothing fits now
└─ StaleBlock      freed before, or a block of another pool
"""


class PoolError(Exception):
    """A pool cannot do what was asked; also raised as such once it is closed."""


class PoolExhausted(PoolError):
    """No free run of memory is long enough."""


class StaleBlock(PoolError):
    """The block was freed before, or belongs to another pool. Nothing was harmed."""
