"""Draft trees in plain torch: the specification that every faster kernel is tested against.

Letters in shapes: R requests, D draft horizon, V vocabulary, K candidates per depth, N rows of a candidate tree
(the anchor is row 0), T row capacity of one verify pass. Nothing here reads a tensor's value on the host, so a
chain of these functions can be captured in a graph. Wherever an order matters it is a total order: float scores
are packed with a tie-breaker into one int64 key, so every device and every batch size selects the same nodes.
"""

import torch
from torch import Tensor

_CHUNK = 64  # vocabulary entries summarised by one maximum in the first stage of the candidate search
_POSITION_BITS = 24
_DEPTH_BITS = 8
_FLAT_BITS = 23


def _descending(values: Tensor) -> Tensor:
    """float32 of any shape -> int64 in [-2^31, 2^31) that sorts ascending as the floats sort descending."""
    bits = values.contiguous().view(torch.int32)
    return (~(bits ^ ((bits >> 31) & 0x7FFFFFFF))).long()


def _first_positions(values: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest entries of the last axis, best first, equal values by smaller position."""
    width = values.shape[-1]
    if width >= 1 << _POSITION_BITS:
        raise ValueError(f"cannot order {width} entries: at most {(1 << _POSITION_BITS) - 1}")
    positions = torch.arange(width, device=values.device)
    keys = (_descending(values) << _POSITION_BITS) | positions
    return keys.topk(count, dim=-1, largest=False).values & ((1 << _POSITION_BITS) - 1)


def draft_candidates(logits: Tensor, topk: int, horizons: Tensor) -> tuple[Tensor, Tensor]:
    """Best tokens per drafted position with their log-probabilities over the whole vocabulary.

    logits [R, D, V] floating, horizons [R] int64 -> token_ids [R, D, min(topk, V)] int64 (best first, equal logits
    by smaller token id), log_probs float32 of the same shape, -inf at depths beyond the request's horizon and
    wherever the draft gave no number.
    """
    depth, vocabulary = logits.shape[-2:]
    logits = logits.float()
    topk = min(topk, vocabulary)
    chunks = vocabulary // _CHUNK
    if chunks > topk:
        # The topk best entries lie in the topk chunks with the best maxima. Searching chunk maxima first reads the
        # vocabulary once with vector instructions, several times faster on a CPU than a selection over all of it.
        body = logits[..., : chunks * _CHUNK].unflatten(-1, (chunks, _CHUNK))
        kept = _first_positions(body.amax(-1), topk).sort(-1).values
        entries = kept[..., None] * _CHUNK + torch.arange(_CHUNK, device=logits.device)
        tail = torch.arange(chunks * _CHUNK, vocabulary, device=logits.device).expand(*logits.shape[:-1], -1)
        entries = torch.cat((entries.flatten(-2), tail), dim=-1)
        token_ids = entries.gather(-1, _first_positions(logits.gather(-1, entries), topk))
    else:
        token_ids = _first_positions(logits, topk)
    log_probs = logits.gather(-1, token_ids) - torch.logsumexp(logits, dim=-1, keepdim=True)
    log_probs = log_probs.clamp(max=0.0)
    usable = torch.arange(depth, device=logits.device) < horizons[:, None]
    # `<= 0` is False for NaN: a broken draft proposes nothing instead of poisoning the order of the tree.
    return token_ids, log_probs.where(usable[..., None] & (log_probs <= 0), -torch.inf)


def build_tree(
    token_ids: Tensor, log_probs: Tensor, anchors: Tensor, max_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The max_rows - 1 nodes with the highest path log-probability (DDTree's best-first set) below each anchor.

    token_ids [R, D, K] int64 and log_probs [R, D, K] float32 (<= 0, no NaN), anchors [R] int64 ->
    token_ids, parents, depths, ranks [R, max_rows] int64, log_scores [R, max_rows] float32, valid [R, max_rows]
    bool. Rows are ordered by (score descending, depth, order of the parent, rank).

    A beam of max_rows - 1 nodes per depth is exact, not a heuristic: scores never rise from parent to child, so a
    node outside its depth's beam, or below such a node, has max_rows - 1 better ones.
    """
    requests, horizon, topk = token_ids.shape
    beam = log_probs.new_zeros(requests, 1)
    root = token_ids.new_zeros(requests, 1)
    scores, parents, choices, first_parent = [beam], [root], [root], 0
    for depth in range(horizon if max_rows > 1 else 0):
        expanded = (beam[:, :, None] + log_probs[:, depth, None, :]).flatten(1)
        kept = _first_positions(expanded, min(max_rows - 1, expanded.shape[1]))
        parents.append(kept // topk + first_parent)
        choices.append(kept % topk + depth * topk)
        first_parent += beam.shape[1]
        beam = expanded.gather(1, kept)
        scores.append(beam)
    found = first_parent + beam.shape[1]
    if found < max_rows:
        scores.append(log_probs.new_full((requests, max_rows - found), -torch.inf))
        parents.append(root.expand(-1, max_rows - found))
        choices.append(root.expand(-1, max_rows - found))

    all_scores = torch.cat(scores, 1)
    order = _first_positions(all_scores, max_rows)
    log_scores = all_scores.gather(1, order)
    rows = torch.arange(max_rows, device=token_ids.device)
    row_of = torch.zeros_like(all_scores, dtype=torch.int64).scatter_(1, order, rows.expand(requests, -1))
    parent_rows = row_of.gather(1, torch.cat(parents, 1).gather(1, order))
    choice = torch.cat(choices, 1).gather(1, order)
    valid = log_scores > -torch.inf
    is_node = valid & (rows > 0)
    tokens = torch.where(is_node, token_ids.flatten(1).gather(1, choice), 0)
    tokens[:, 0] = anchors
    return (
        tokens,
        parent_rows * is_node,
        (choice // topk + 1) * is_node,
        (choice % topk) * is_node,
        log_scores,
        valid,
    )


def path_product(conditional: Tensor, parents: Tensor, horizon: int) -> Tensor:
    """Product of conditional [R, N] float32 along each row's parent chain (parents [R, N] int64, anchor row 0).

    Multiplying downwards, one depth at a time, makes every node its parent's *final* value times a factor <= 1, so
    rounding cannot lift a child above its parent (pointer doubling associates the product differently and can).
    """
    conditional = conditional.clone()
    conditional[:, 0] = 1.0
    survival = conditional
    for _ in range(horizon):
        survival = conditional * survival.gather(1, parents)
    return survival


def fill_rows(survival: Tensor, depths: Tensor, valid: Tensor, keep: Tensor, total_rows: int) -> Tensor:
    """Choose total_rows rows over the whole batch: anchors, then kept nodes, then dropped nodes, best first.

    survival [R, N] float32 in [0, 1], depths [R, N] int64 < 256, valid and keep [R, N] bool -> keep [R, N] bool.
    Within a class the order is (survival descending, depth, request, row), which puts parents before children:
    the first total_rows rows are ancestor-closed whenever keep is. NaN counts as 0.
    """
    requests, capacity = survival.shape
    if requests * capacity >= 1 << _FLAT_BITS:
        raise ValueError(f"{requests} x {capacity} rows exceed the {(1 << _FLAT_BITS) - 1} that one batch can order")
    flat = torch.arange(requests * capacity, device=survival.device).view(requests, capacity)
    is_anchor = flat % capacity == 0
    tier = 3 - valid.long() - (keep & valid).long() - is_anchor.long()
    # A float in [0, 1] needs 30 bits of its pattern, so that tier, survival, depth and index share 63 bits.
    by_survival = _descending(survival.nan_to_num(0.0).clamp(0.0, 1.0)) + (1 << 30)
    key = (((tier << 30) | by_survival) << _DEPTH_BITS | depths) << _FLAT_BITS | flat
    first = key.flatten().topk(min(total_rows, key.numel()), largest=False, sorted=False).values
    chosen = torch.zeros_like(valid).flatten().scatter_(0, first & ((1 << _FLAT_BITS) - 1), True)
    return chosen.view_as(valid) & valid


def layout_rows(
    token_ids: Tensor, parents: Tensor, depths: Tensor, keep: Tensor, capacity: int, horizon: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compact the kept rows of all trees, request by request, into `capacity` verify rows.

    token_ids, parents, depths [R, N] int64, keep [R, N] bool (ancestor-closed, every anchor kept, at most capacity
    rows in all) -> token_ids, depths, request, tree_row, parent [T] int64, row_offsets [R + 1] int64, ancestor_mask
    [T, N] bool over the kept rows of the own request, is_padding [T] bool.
    """
    requests, width = keep.shape
    device = keep.device
    kept_before = keep.flatten().cumsum(0)
    row_offsets = torch.cat((kept_before.new_zeros(1), kept_before[width - 1 :: width]))
    # Rows that are not kept all land in one spare slot behind the capacity, which is cut off again.
    flat_row = torch.where(keep.flatten(), kept_before - 1, capacity).clamp(max=capacity)
    source = flat_row.new_zeros(capacity + 1)
    source = source.scatter_(0, flat_row, torch.arange(requests * width, device=device))[:capacity]

    rows = torch.arange(capacity, device=device)
    is_padding = rows >= row_offsets[-1]
    source = source.masked_fill(is_padding, 0)
    request = source // width
    parent = flat_row[request * width + parents.flatten()[source]]
    parent = torch.where(is_padding, rows, parent)
    own_column = (rows - row_offsets[request]).masked_fill(is_padding, 0)
    ancestor_mask = torch.arange(width, device=device) == own_column[:, None]
    ancestor = parent
    for _ in range(horizon.bit_length()):  # the known part of the path doubles with every step
        ancestor_mask = ancestor_mask | ancestor_mask[ancestor]
        ancestor = ancestor[ancestor]
    return (
        token_ids.flatten()[source].masked_fill(is_padding, 0),
        depths.flatten()[source].masked_fill(is_padding, 0),
        request,
        source % width,
        parent,
        row_offsets,
        ancestor_mask,
        is_padding,
    )


def advance_walk(
    row_tokens: Tensor,
    row_parent: Tensor,
    row_request: Tensor,
    is_padding: Tensor,
    current: Tensor,
    alive: Tensor,
    next_tokens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Move every living request to the child of its current row that carries its next token.

    row_* and is_padding [T] describe the verify rows, current and next_tokens [R] int64, alive [R] bool -> current
    [R] int64 (unchanged where no child matches), moved [R] bool. At most one child can match, see tree/accept.py.
    """
    rows = torch.arange(row_tokens.shape[0], device=row_tokens.device)
    is_child = (row_parent == current[row_request]) & (row_parent != rows) & ~is_padding
    matches = is_child & (row_tokens == next_tokens[row_request]) & alive[row_request]
    child = torch.full_like(current, -1).scatter_reduce_(0, row_request, rows.where(matches, -1), "amax")
    moved = child >= 0
    return torch.where(moved, child, current), moved
