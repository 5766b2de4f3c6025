"""The kernels of ``triton_attention``, in the Triton language.

A tile is up to QUERIES queries of one row, with the GROUP heads of each that share a key/value head: TILE
lanes, of which the last few may be unused.  Partial results lie in fp32 as [tiles, num_kv_heads, num_splits,
TILE * (VALUE_DIM + 2)]: the lanes' weighted sums of values, their largest scores, and their weights.

Annotations are not postponed in this file, since triton reads ``tl.constexpr`` from them.
"""

import triton
import triton.language as tl


@triton.jit
def _locate(
    query_start: tl.tensor,
    context_lens: tl.tensor,
    num_rows: tl.tensor,
    tile: tl.tensor,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """What a tile is: its row, its first query's token and position, the first and last position to read.

    Row r's tiles begin at query_start[r] // QUERIES + r, which leaves some tiles unused: their first
    position is above their last.
    """
    low = tl.full([], 0, tl.int32)
    high = low + num_rows - 1
    while low < high:  # find the last row that begins at or before this tile
        middle = (low + high + 1) // 2
        begins = tl.load(query_start + middle) // QUERIES + middle
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle - 1)
    start = tl.load(query_start + low)
    length = tl.load(query_start + low + 1) - start
    query = (tile - start // QUERIES - low) * QUERIES  # index in the row
    position = tl.load(context_lens + low) + query
    last = position + tl.minimum(length - query, QUERIES) - 1
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - WINDOW + 1, 0)
    first = tl.where(query < length, first, last + 1)
    return low, start + query, position, first, last


@triton.jit
def _partial_at(
    tile: tl.tensor,
    kv_head: tl.tensor,
    split: tl.tensor,
    num_splits: tl.tensor,
    VALUE_DIM: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Offset of the partial result of a tile, head and split."""
    index = (tile.to(tl.int64) * tl.num_programs(1) + kv_head) * num_splits + split
    return index * (TILE * (VALUE_DIM + 2))


@triton.jit
def _gather(
    cache: tl.tensor, slot: tl.tensor, inside: tl.tensor, DIM: tl.constexpr, PAD: tl.constexpr
) -> tl.tensor:
    """The keys or values at some slots of a head, zeros outside.  [KEYS] -> [KEYS, PAD]"""
    at = tl.arange(0, PAD)
    return tl.load(
        cache + slot[:, None] * DIM + at[None, :], mask=inside[:, None] & (at[None, :] < DIM), other=0.0
    )


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """By exp, which cannot overflow here."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


# Only these integers vary from step to step: a kernel is compiled once, whatever their values.
_VARYING = ["num_rows", "first_tile", "max_blocks", "num_splits"]


@triton.jit(do_not_specialize=_VARYING)
def attend_split(
    query: tl.tensor,  # [num_tokens, num_heads, KEY_DIM]
    key_cache: tl.tensor,  # [num_blocks, num_kv_heads, BLOCK_SIZE, KEY_DIM]
    value_cache: tl.tensor,  # [num_blocks, num_kv_heads, BLOCK_SIZE, VALUE_DIM]
    block_table: tl.tensor,  # [num_rows, max_blocks]
    partial: tl.tensor,  # [tiles, num_kv_heads, num_splits, TILE * (VALUE_DIM + 2)]: totals, tops, weights
    query_start: tl.tensor,
    context_lens: tl.tensor,
    num_rows: tl.tensor,
    first_tile: tl.tensor,
    max_blocks: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """The softmax of one tile over one split, not yet divided by its weight."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, token, position, first, last = _locate(
        query_start, context_lens, num_rows, first_tile + tile, QUERIES, WINDOW
    )
    # Blocks of keys begin at multiples of KEYS, so all queries meet a key in the same place.
    begin = tl.maximum(split * SPLIT, first // KEYS * KEYS)
    end = tl.minimum(split * SPLIT + SPLIT, last + 1)
    if begin >= end:
        return
    lane = tl.arange(0, TILE)  # a query and one of its heads
    of_query, head = lane // GROUP, kv_head * GROUP + lane % GROUP
    used = (lane < QUERIES * GROUP) & (position + of_query <= last)
    key_at, value_at = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    source = (token + of_query).to(tl.int64) * stride_token + head * stride_head
    q = tl.load(
        query + source[:, None] + key_at[None, :], mask=used[:, None] & (key_at[None, :] < KEY_DIM), other=0.0
    )
    if UPCAST:
        q = q.to(tl.float32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, VALUE_PAD], tl.float32)
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        inside = at < end
        block = tl.load(block_table + row * max_blocks + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        slot = (block * tl.num_programs(1) + kv_head) * BLOCK_SIZE + at % BLOCK_SIZE
        k = tl.trans(_gather(key_cache, slot, inside, KEY_DIM, KEY_PAD))
        v = _gather(value_cache, slot, inside, VALUE_DIM, VALUE_PAD)
        if UPCAST:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision="ieee") * scale  # [TILE, KEYS]
        if SOFTCAP > 0:
            scores = SOFTCAP * _tanh(scores / SOFTCAP)
        back = (position + of_query)[:, None] - at[None, :]  # how far the query looks back
        visible = (back >= 0) & inside[None, :]
        if WINDOW:
            visible = visible & (back < WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        # A block that a query does not see leaves its three numbers as they were, to the bit.
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep = tl.exp(top - base)
        p = tl.exp(scores - base[:, None])
        weight = tl.fma(weight, keep, tl.sum(p, 1))
        p = p.to(v.dtype)
        if UPCAST:
            p, v = p.to(tl.float32), v.to(tl.float32)
        total = tl.dot(p, v, total * keep[:, None], input_precision="ieee")
        top = new_top
    place = partial + _partial_at(tile, kv_head, split, tl.num_programs(2), VALUE_DIM, TILE)
    tl.store(place + lane[:, None] * VALUE_DIM + value_at[None, :], total, mask=value_at[None, :] < VALUE_DIM)
    tl.store(place + VALUE_DIM * TILE + lane, top)
    tl.store(place + (VALUE_DIM + 1) * TILE + lane, weight)


@triton.jit(do_not_specialize=_VARYING)
def fold_splits(
    partial: tl.tensor,  # as attend_split leaves it
    sinks: tl.tensor,  # [num_heads] or None
    out: tl.tensor,  # [num_tokens, num_heads, VALUE_DIM]
    query_start: tl.tensor,
    context_lens: tl.tensor,
    num_rows: tl.tensor,
    first_tile: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Join the splits of one tile in the order of the context, and divide by the weight."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    _, token, position, first, last = _locate(
        query_start, context_lens, num_rows, first_tile + tile, QUERIES, WINDOW
    )
    if first > last:
        return
    lane, value_at = tl.arange(0, TILE), tl.arange(0, VALUE_PAD)
    of_query, head = lane // GROUP, kv_head * GROUP + lane % GROUP
    used = (lane < QUERIES * GROUP) & (position + of_query <= last)
    top = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32)
        weight += 1.0
    total = tl.zeros([TILE, VALUE_PAD], tl.float32)
    for split in range(first // SPLIT, last // SPLIT + 1):
        place = partial + _partial_at(tile, kv_head, split, num_splits, VALUE_DIM, TILE)
        split_total = tl.load(
            place + lane[:, None] * VALUE_DIM + value_at[None, :],
            mask=value_at[None, :] < VALUE_DIM,
            other=0.0,
        )
        split_top = tl.load(place + VALUE_DIM * TILE + lane)
        split_weight = tl.load(place + (VALUE_DIM + 1) * TILE + lane)
        new_top = tl.maximum(top, split_top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep, add = tl.exp(top - base), tl.exp(split_top - base)
        weight = tl.fma(split_weight, add, weight * keep)
        total = tl.fma(split_total, tl.broadcast_to(add[:, None], [TILE, VALUE_PAD]), total * keep[:, None])
        top = new_top
    target = ((token + of_query).to(tl.int64) * (tl.num_programs(1) * GROUP) + head) * VALUE_DIM
    tl.store(
        out + target[:, None] + value_at[None, :],
        (total / tl.where(used, weight, 1.0)[:, None]).to(out.dtype.element_ty),
        mask=used[:, None] & (value_at[None, :] < VALUE_DIM),
    )
