"""Integer keys that sort like floats: every selection here is by one int64 whose low word breaks the ties."""

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-(1 << 63))


@triton.jit
def ascending(values):
    """float32 without NaN -> int32 that sorts like it, both zeros being equal."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def largest_first_key(values, positions):
    """float32 and positions in [0, 2^31) -> int64: the largest value has the largest key, then the first position."""
    return (ascending(values).to(tl.int64) << 32) | (0x7FFFFFFF - positions.to(tl.int64))


@triton.jit
def key_position(keys):
    """The position int64 inside a largest_first_key."""
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF)


@triton.jit
def key_value(keys):
    """The float32 inside a largest_first_key."""
    bits = (keys >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def take_largest(keys, K: tl.constexpr):
    """The K largest of different int64 keys, largest first; where there are fewer, NO_KEY.

    K sweeps in a loop: over thousands of keys an unrolled sorting network takes the compiler half a minute.
    """
    rank = tl.arange(0, K)
    taken = tl.full((K,), NO_KEY, tl.int64)
    for step in range(K):
        largest = tl.max(keys, axis=0)
        taken = tl.where(rank == step, largest, taken)
        keys = tl.where(keys == largest, NO_KEY, keys)
    return taken
