"""Writing and moving KV rows in plain torch: the specification of the kernels that do it."""

from collections.abc import Sequence

from torch import Tensor


def compact_kv(caches: Sequence[Tensor], target: Tensor, source: Tensor) -> None:
    """Copy row source[r, m] over row target[r, m] in every cache, in place, all rows read before any is written.

    caches: the K and V buffers of all layers, each [S, ...] with contiguous rows; target and source [R, M] int64, -1
    nowhere. Targets of one request may be sources of the same request, never of another. Pairs with target == source
    pad requests that move fewer than M rows; two pairs with the same target have the same source.
    """
    target, source = target.flatten(), source.flatten()
    for cache in caches:
        cache[target] = cache[source]


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write row t of k and v to slot slots[t], in place; what a slot named twice holds is not specified.

    k [T, Hkv, Dh], v [T, Hkv, Dv]; caches [S, Hkv, Dh] and [S, Hkv, Dv] of the same dtype; slots [T] int64. Raises
    IndexError for a slot outside the cache.
    """
    if slots.numel() > 0 and slots.device.type == "cpu" and int(slots.min()) < 0:
        raise IndexError("store_kv: negative slot")
    k_cache[slots] = k
    v_cache[slots] = v
