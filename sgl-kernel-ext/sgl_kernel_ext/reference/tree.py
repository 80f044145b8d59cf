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
    bits = (values + 0.0).contiguous().view(torch.int32)  # the two zeros are equal: -0 becomes 0
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

    token_ids [R, D, K] int64, log_probs [R, D, P, K] float32 (<= 0, no NaN; P = 1, or K where a candidate's value
    depends on the rank of its parent, the anchor having rank 0), anchors [R] int64 -> token_ids, parents, depths,
    ranks [R, max_rows] int64, log_scores [R, max_rows] float32, valid [R, max_rows] bool. Rows are ordered by (score
    descending, depth, order of the parent, rank).

    A beam of max_rows - 1 nodes per depth is exact, not a heuristic: scores never rise from parent to child, so a
    node outside its depth's beam, or below such a node, has max_rows - 1 better ones.
    """
    requests, horizon, topk = token_ids.shape
    beam_width = max_rows - 1
    if horizon * beam_width * topk >= 1 << 31:
        raise ValueError(f"{max_rows} rows over {horizon} x {topk} candidates cannot be ordered in 32 bits")
    # One int64 per node: its cost (-score, a non-negative float, whose bit pattern sorts like the number) above its
    # place (depth * beam_width + position of the parent in its beam) * topk + rank, which breaks ties and says what
    # the node is. Written as pairs of 32-bit words, the low one first.
    pairs = token_ids.new_empty((requests, horizon, beam_width, topk, 2), dtype=torch.int32)
    places = torch.arange(horizon * beam_width * topk, dtype=torch.int32, device=pairs.device)
    pairs[..., 0] = places.view(horizon, beam_width, topk)
    costs, keys = pairs.view(torch.float32)[..., 1], pairs.view(torch.int64).flatten(2)
    step_costs = -log_probs
    beam = log_probs.new_full((requests, beam_width), torch.inf)
    beam[:, :1] = 0.0  # the anchor; the other entries only keep the shape the same at every depth
    ranks = anchors.new_zeros(requests, beam_width)
    beams = keys.new_empty(requests, horizon, beam_width)
    for depth in range(horizon):
        steps = step_costs[:, depth]
        if log_probs.shape[2] > 1:
            steps = steps.gather(1, ranks.unsqueeze(2).expand(-1, -1, topk))
        torch.add(beam.unsqueeze(2), steps, out=costs[:, depth])
        best = keys[:, depth].topk(beam_width, largest=False).values
        beams[:, depth] = best
        beam = best.view(torch.float32)[:, 1::2]
        if log_probs.shape[2] > 1:
            ranks = best.view(torch.int32)[:, ::2].long() % topk
    return _best_rows(beams, token_ids, anchors)


def _best_rows(
    beams: Tensor, token_ids: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """build_tree's result from the keys [R, D, max_rows - 1] of the best nodes per depth."""
    requests, horizon, beam_width = beams.shape
    topk = token_ids.shape[2]
    count = min(beam_width, horizon * beam_width)
    best, order = beams.flatten(1).topk(count, largest=False)
    words = best.view(torch.int32).view(requests, count, 2)
    scores = -words[..., 1].view(torch.float32)
    place = words[..., 0].long()
    parent = place // topk  # counted through all beams, the anchor's own beam coming first
    rank = place % topk
    depth = parent // max(beam_width, 1)
    rows = torch.arange(1, count + 1, device=beams.device).expand(requests, -1)
    row_of = beams.new_zeros(requests, (horizon + 1) * beam_width).scatter_(1, order + beam_width, rows)

    nodes = torch.stack(
        (token_ids.flatten(1).gather(1, depth * topk + rank), row_of.gather(1, parent), depth + 1, rank)
    )
    fields = beams.new_zeros(4, requests, beam_width + 1)
    fields[:, :, 1 : count + 1] = nodes * (scores > -torch.inf)
    fields[0, :, 0] = anchors
    log_scores = scores.new_full((requests, beam_width + 1), -torch.inf)
    log_scores[:, 0] = 0.0
    log_scores[:, 1 : count + 1] = scores
    tokens, parents, depths, ranks = fields.unbind(0)
    return tokens, parents, depths, ranks, log_scores, log_scores > -torch.inf


def path_product(conditional: Tensor, parents: Tensor, horizon: int) -> Tensor:
    """Product of conditional [R, N] float32 along each row's parent chain (parents [R, N] int64, anchor row 0).

    Multiplying downwards, one depth at a time, makes every node its parent's *final* value times a factor <= 1, so
    rounding cannot lift a child above its parent (pointer doubling associates the product differently and can).
    """
    conditional = conditional.clone()
    conditional[:, 0] = 1.0
    survival = conditional
    for _ in range(horizon - 1):  # depth 1 is final from the start
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


def matching_child(token_ids: Tensor, parent: Tensor, next_tokens: Tensor) -> Tensor:
    """For every verify row, its child that carries the row's next token.

    token_ids, parent (own index at anchors and padding) and next_tokens [T] int64 -> [T] int64, -1 where no child
    matches. At most one can, see tree/accept.py.
    """
    rows = torch.arange(token_ids.shape[0], device=token_ids.device)
    matches = (token_ids == next_tokens[parent]) & (parent != rows)
    return torch.full_like(parent, -1).scatter_reduce_(0, parent, rows.where(matches, -1), "amax")
