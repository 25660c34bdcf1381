"""What a caller stores: arrays, and the pool that keeps them."""
