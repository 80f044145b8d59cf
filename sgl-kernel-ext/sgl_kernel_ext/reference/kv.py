"""Moving KV rows in plain torch: the specification of the kernel that leaves an accepted path in consecutive slots."""

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
