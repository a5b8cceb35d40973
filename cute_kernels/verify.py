"""The step of one layer for several tokens a row, one launch, on tensor cores (`replay.draft`).

A CTA works on `Tile.rows` rows of one head of one row of the batch:

1. start the loads that need neither slot nor cursor: gates, queries and keys, the tokens' values;
2. load slot and cursor, start the bulk copy of its tile of the checkpoint, or of the codes of the read copy, then the
   loads of the window's records;
3. score the records with the tokens, each warp some of them, and append the tokens' keys and decays;
4. after a barrier each warp multiplies 16 rows of the tile by all probes at once, adds the window's part, and, under a
   delta rule, solves for the tokens' records; it writes outputs and appends values;
5. a row that folds then folds its committed records into the tile and writes it back: outputs never wait for that. With
   a read copy it folds them into the checkpoint in global memory, of which it then makes the copy anew.

The committed records are read the same way whether a row folds or not, and an append lands outside of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from cute_kernels.args import StepTensors
from cute_kernels.configs import SIZE_BYTES, DraftShape, Tile
from cute_kernels.drafts import Channels, Cta, Draft, DraftLoads, WindowLoads, load_probes, store_pair
from cute_kernels.primitives.arithmetic import LOG2_E, at_most, exp2, select
from cute_kernels.primitives.bulk import bulk_init, bulk_load, bulk_wait
from cute_kernels.primitives.control import when
from cute_kernels.primitives.convert import pack, unpack
from cute_kernels.primitives.memory import EVICT_FIRST, EVICT_NORMAL, store_words_if
from cute_kernels.primitives.mma import Fragment, float_fragment, lower_halves, multiply, upper_halves
from cute_kernels.primitives.reduce import broadcast
from cute_kernels.records import TileMemory, fold_records, leads_group
from cute_kernels.recurrences.base import Gate
from cute_kernels.replay.channels import own_channels
from cute_kernels.replay.codes import PROBE_SCALE, SCALED_PROBES
from cute_kernels.replay.cursor import RowCursor, is_padding, load_force, load_slot, load_span
from cute_kernels.replay.draft import read_state, score_block
from cute_kernels.replay.quant import TILE_ROWS, CopyPlaces, clear_scales, encode_rows
from cute_kernels.replay.window import Place, address, store_scalar_if


def score_records(cta: Cta, cursor: RowCursor, early: DraftLoads, loads: WindowLoads, draft: Draft) -> None:
    """Score this warp's blocks of records with every probe, and append the keys of tokens among them."""
    shape, scores, factors = cta.shape, cta.scores, draft.row_factors()
    pairs = [list(range(b, min(b + 2, shape.probe_blocks))) for b in range(0, shape.probe_blocks, 2)]
    first = cta.place.warp * 8 + cta.place.lane // 4
    records = [first + 8 * shape.warps * step for step in range(len(loads.keys))]
    keys = cta.vectors(loads.keys, [select(r < shape.window_columns, r, Int32(0)) for r in records])
    for step, words in enumerate(loads.keys):
        block = cta.place.warp + shape.warps * step - shape.window_columns // 8
        chosen = [[factors[b] for b in pair] for pair in pairs]

        def store_window(step: int = step, chosen: list[Any] = chosen) -> None:
            # Few warps score the window: where channels decay, so many registers are better spent otherwise.
            probes = cta.probes(load_probes(cta) if shape.channels and shape.token_blocks > 1 else early.probes)
            for pair, factor in zip(pairs, chosen, strict=True):
                raw = score_block(probes, pair, keys, step, cta.terms, loads.zero)
                scores.store_window(pair, raw, step, factor, draft.decays, cta.place.warp)

        def store_tokens(
            step: int = step, block: Any = block, chosen: list[Any] = chosen, words: list[Any] = words
        ) -> None:
            weights, key_factor = start_tokens(cta, draft, block)
            for pair, factor in zip(pairs, chosen, strict=True):
                if shape.channels:
                    raw = scores.load_sums(pair, block)
                else:
                    raw = score_block(cta.probes(early.probes), pair, keys, step, cta.terms, loads.zero)
                scores.store_tokens(block, pair, raw, factor, weights, draft.gate.skip)
            append_key(cta, cursor, block * 8 + cta.place.lane // 4, words, key_factor)

        group = (block + shape.window_columns // 8) // 2  # a window of one group is always scored
        live = (group * 16 < cursor.count) | (group == 0) if shape.window_columns > 16 else Boolean(True)
        when((block < 0) & live, store_window)
        when((block >= 0) & (block < shape.token_blocks), store_tokens)


def start_tokens(cta: Cta, draft: Draft, block: Any) -> tuple[list[Any], Any]:
    """Store the decays between tokens; weights of this lane's two tokens of a block, and the factor of its key."""
    if not cta.shape.channels:
        cta.scores.store_decays(block, draft.decays)
        cute.arch.sync_warp()
    weights = draft.in_columns(draft.decays.token_weight, block)
    if cta.shape.probes == 1:
        return weights, Float32(1.0)
    factor = draft.factors[1][0]
    for b in range(1, cta.shape.token_blocks):
        factor = select(block == b, draft.factors[1][b], factor)
    return [w * broadcast(factor, cta.place.lane % 4 * 8 + 4 * e) for e, w in enumerate(weights)], factor


def stage_channels(cta: Cta, cursor: RowCursor, early: DraftLoads, records: Any) -> None:
    """Stage the decays by channel, append the tokens', and sum the tokens' scores with each other over channels."""
    policy: Any = cta.policy
    place, tokens = cta.place, cta.shape.tokens
    decays = [[policy.log_decay(token.gate, early.gate) for token in channel] for channel in early.channels]
    records.stage_draft(cta.tile, place, decays, cta.memory.staging)
    stage_probes(cta, early, decays, records)
    for t in range(tokens):
        of_token = [channel[t] for channel in decays]
        ring, dtype, valid = cta.tensors.pool.decay, cta.key.decay_dtype, cta.is_token(t)
        records.append(ring, dtype, cta.tile, place, cursor, of_token, ahead=t, valid=valid)
    for later in range(tokens):
        sums = [Float32(0.0)] * (2 * tokens)
        for channel, of_channel in zip(early.channels, decays, strict=True):
            between = Float32(0.0)
            for earlier in range(later, -1, -1):
                key = channel[earlier].key * exp2(between * Float32(LOG2_E))
                sums[earlier] = sums[earlier] + channel[later].query * key
                sums[tokens + earlier] = sums[tokens + earlier] + channel[later].key * key
                between = between + of_channel[earlier]
        cta.scores.store_sums(later, sums, place.warp)


def stage_probes(cta: Cta, early: DraftLoads, decays: list[list[Any]], records: Any) -> None:
    """Stage this thread's channels of every probe, decayed since the start of the window; zeros where no token is."""
    shape, staged, apart = cta.shape, cta.staged, cta.shape.token_blocks * 8
    scale = Float32(PROBE_SCALE if cta.key.read_dtype in SCALED_PROBES else 1.0)
    for own, words, channel, of_channel in zip(
        own_channels(cta.tile, cta.place.thread), records.words, early.channels, decays, strict=True
    ):
        so_far = Float32(0.0)
        for word in words:
            so_far = so_far + word
        for t in range(apart):
            pair = [Float32(0.0)] * 2
            if t < shape.tokens:
                so_far = so_far + of_channel[t]
                decay = exp2(so_far * Float32(LOG2_E)) * scale
                pair = [channel[t].query * decay, channel[t].key * decay]
            staged.store(t, *own, pair, apart, cta.terms)


def append_key(cta: Cta, cursor: RowCursor, token: Any, words: list[Any], factor: Any) -> None:
    """Write a token's key to the ring as a block of records holds it, normalised where the layer does that."""
    dtype, vector_bytes = cta.key.activation_dtype, cta.tile.read_vector * cta.tile.activation_size
    if cta.policy.value_needs_state:
        words = pack([x * factor for x in unpack(words, dtype)], dtype)
    mine = cta.is_token(token) * leads_group(cta.key, cta.place)
    start = cta.key_place(cursor, cursor.count + token) + cta.place.lane % 4 * vector_bytes
    size = vector_bytes // 4
    for c in range(len(words) // size):
        for first in range(0, size, 4):
            part = words[c * size + first : c * size + min(first + 4, size)]
            store_words_if(mine, start, part, offset=c * 4 * vector_bytes + first * 4)


def append_decays(cta: Cta, cursor: RowCursor, gate: Gate) -> None:
    """Write the tokens' decay records, a lane each."""
    place = cta.place
    mine = cta.is_token(place.lane) * Int32(place.warp == 0) * Int32(place.first_row == 0)
    physical = cursor.physical(cursor.count + place.lane)
    where = address(cta.tensors.pool.decay, 4, cursor.slot, place.head, physical)
    store_words_if(mine, where, [gate.record.bitcast(Uint32)])


def value_fragments(words: list[list[Uint32]], dtype: str, terms: int) -> tuple[Fragment, Fragment]:
    """The left side of a product: two channels of up to four records, as pairs of words."""
    if dtype == "bfloat16":
        alone = [word for (word,) in words] + [Uint32(0)] * (4 - len(words))
        upper, lower = (
            [[(halves(alone[0], alone[1]), halves(alone[2], alone[3]))]] for halves in (lower_halves, upper_halves)
        )
        return upper, lower
    pairs = [unpack(pair, dtype)[:2] for pair in words]
    pairs += [[Float32(0.0), Float32(0.0)]] * (4 - len(pairs))
    upper, lower = (float_fragment([pair[c] for pair in pairs], terms) for c in (0, 1))
    return upper, lower


def read_rows(cta: Cta, cursor: RowCursor, early: DraftLoads, loads: WindowLoads, draft: Draft) -> None:
    """This warp's rows of all outputs, and of the tokens' values."""
    shape, scores, terms = cta.shape, cta.scores, cta.terms
    factors = draft.column_factors()
    rows = [select(part.inside != 0, part.first - cta.place.lane // 4 * 2, Int32(0)) for part in cta.channels]
    probes = cta.staged if shape.channels else cta.probes(early.probes)
    dtype = cta.key.read_dtype or cta.key.checkpoint_dtype
    products = read_state(dtype, cta.memory.state, rows, probes, terms, loads.scales)
    for readouts in products:
        for b, of_block in enumerate(readouts):
            readouts[b] = [x * factors[b][j % 2] for j, x in enumerate(of_block)]
    products = add_window(cta, cursor, loads, products)
    for i, (part, readouts) in enumerate(zip(cta.channels, products, strict=True)):
        epilogues = [[cta.policy.epilogue(x) for x in block] for block in early.epilogues[i]]
        if cta.policy.value_needs_state:
            blocks = shape.token_blocks
            right = []
            for b in range(blocks):
                strengths = draft.in_columns(draft.gate.strength, b)
                right.append([strengths[j % 2] * epilogues[b][j] - readouts[blocks + b][j] for j in range(4)])
            records, outputs = scores.solve(right, readouts[:blocks])
            append_values(cta, cursor, part, records)
        else:
            outputs = add_tokens(cta, cursor, part, early.values[i], readouts)
        write_outputs(cta, part, outputs, epilogues)


def add_window(cta: Cta, cursor: RowCursor, loads: WindowLoads, products: list[Any]) -> list[Any]:
    """The products, [16 rows][probe block][4], with the window's part; records behind the last 16 live ones are left
    out (which scores of them are not made)."""

    def added(group: int, products: list[Any]) -> list[Any]:
        window = [cta.scores.load(b, 16 * group, cta.terms) for b in range(cta.shape.probe_blocks)]
        sums = []
        for values, readouts in zip(loads.values, products, strict=True):
            upper, lower = value_fragments(values[group], cta.key.record_dtype, cta.terms)
            sums.append(
                [multiply(x, upper, lower, scores, cta.terms) for x, scores in zip(readouts, window, strict=True)]
            )
        return sums

    products = added(0, products)
    if cta.shape.window_columns == 16:
        return products
    places = [(i, b, j) for i, x in enumerate(products) for b in range(len(x)) for j in range(4)]
    held = cute.make_rmem_tensor((len(places),), Float32)

    def hold(products: list[Any]) -> None:
        for n, (i, b, j) in enumerate(places):
            held[n] = products[i][b][j]

    def taken() -> list[Any]:
        sums = iter([held[n] for n in range(len(places))])
        return [[[next(sums) for _ in range(4)] for _ in readouts] for readouts in products]

    hold(products)
    for group in range(1, cta.shape.window_columns // 16):
        when(cursor.count > 16 * group, lambda group=group: hold(added(group, taken())))
    return taken()


def add_tokens(
    cta: Cta, cursor: RowCursor, part: Channels, words: list[list[Uint32]], readouts: list[list[Any]]
) -> list[list[Any]]:
    """Outputs with what the tokens' own values add, which are inputs; appends those."""
    half = cta.shape.token_blocks == 1
    upper, lower = value_fragments(words, cta.key.activation_dtype, cta.terms)
    for b in range(cta.shape.token_blocks):
        own = cta.scores.load(b, cta.shape.window_columns, cta.terms, half=half)
        readouts[b] = multiply(readouts[b], upper, lower, own, cta.terms)
    for pair, token in zip(words, cta.own(0), strict=False):
        store_pair(part, cta.is_token(token), cta.value_place(cursor, cursor.count + token), pair)
    return readouts


def append_values(cta: Cta, cursor: RowCursor, part: Channels, records: list[list[Any]]) -> None:
    """Write the tokens' records of two channels, as `Scores.solve` returns them."""
    for b, block in enumerate(records):
        for e, token in enumerate(cta.own(0)[2 * b : 2 * b + 2]):
            words = pack([block[e], block[2 + e]], cta.key.record_dtype)
            store_pair(part, cta.is_token(token), cta.value_place(cursor, cursor.count + token), words)


def write_outputs(cta: Cta, part: Channels, outputs: list[list[Any]], epilogues: list[list[Any]]) -> None:
    """Write two channels of every output after the layer's epilogue."""
    for b, block in enumerate(outputs):
        for e, token in enumerate(cta.own(0)[2 * b : 2 * b + 2]):
            pair = [cta.policy.finish(block[i], epilogues[b][i]) for i in (e, 2 + e)]
            where = cta.input_place(cta.tensors.out, token, cta.place.head, cta.first_channel)
            store_pair(part, cta.is_token(token), where, pack(pair, cta.key.activation_dtype))


@cute.jit
def write_copy(cta: Cta, cursor: RowCursor):
    """Make the copy of this CTA's rows from the checkpoint, 16 rows a warp; the last CTA clears padding scales."""
    key, shape = cta.key, cta.copy_shape
    state = address(cta.tensors.pool.checkpoint, SIZE_BYTES[key.checkpoint_dtype], cursor.slot)
    places = CopyPlaces.of(cta.tensors.pool.copy, cursor.slot)
    first = cta.place.head * key.head_dim + cta.place.first_row
    for tile in cutlass.range(cta.place.warp, cta.tile.rows // TILE_ROWS, cta.tile.warps, unroll=1):
        encode_rows(shape, state, places, first + tile * TILE_ROWS, cta.place.lane)
    if cutlass.const_expr(shape.tiles * TILE_ROWS > shape.rows):
        if first + cta.tile.rows == shape.rows:
            for tile in cutlass.range(shape.rows // TILE_ROWS + cta.place.warp, shape.tiles, cta.tile.warps, unroll=1):
                clear_scales(shape, places, tile * TILE_ROWS, cta.place.lane)


@cute.kernel
def verify_kernel(tensors: StepTensors, total: Int32, pad_slot: Int32, key: cutlass.Constexpr):
    """One CTA: see this module's docstring, and `step.step_kernel` for the order of its loads.

    `total` is the extent of the inputs' token axis.
    """
    tile, shape = Tile.of(key), DraftShape.of(key)
    _, row, _ = cute.arch.block_idx()
    place = Place.of(key, Int32(0) if key.rows.has_cu_seqlens else row)
    thread, head = place.thread, place.head
    shared = TileMemory.allocate(tile.bytes, shape.staging_bytes(tile))
    if cutlass.const_expr(key.rows.pdl):
        cute.arch.griddepcontrol_wait()
    slot = load_slot(tensors.rows.cache_indices, row, key.rows.index_dtype)
    first_token, num_tokens = load_span(tensors.rows, row, shape.tokens)
    padding = is_padding(slot, pad_slot)
    if cutlass.const_expr(key.rows.has_cu_seqlens):
        # Lengths that do not fit the inputs are a mistake of the caller's; they must not lead out of them.
        first_token = at_most(first_token, total)
        num_tokens = at_most(num_tokens, total - first_token)
        # A row without tokens has nothing to do; what it loads meanwhile is another row's.
        first_token = select(num_tokens == 0, Int32(0), first_token)
        padding = padding | (num_tokens == 0)
    # Every row waits for the tile before it folds.
    memory = replace(shared, arrival=None)
    cta = Cta(tensors, key, place, Channels.of(tile, place), first_token, num_tokens, memory)
    early = DraftLoads.start(cta)
    bulk_init(thread, shared.arrival)
    cute.arch.barrier()
    if padding:
        for token in cutlass.range_constexpr(shape.tokens):
            for first in range(0, tile.rows, tile.threads):
                channel = first + thread
                where = cta.input_place(tensors.out, token, head, place.first_row + channel)
                inside = Int32(channel < tile.rows) * cta.is_token(token)
                store_scalar_if(inside, where, Float32(0.0), key.activation_dtype)
    else:
        cursor = RowCursor.load(
            tensors.cursors,
            slot,
            load_force(tensors.rows, row),
            capacity=key.ring_capacity,
            window=key.window,
            tokens=num_tokens,
        )
        tile_at = address(tensors.pool.checkpoint, SIZE_BYTES[key.checkpoint_dtype], slot, head, place.first_row)
        read_at = tile_at
        if cutlass.const_expr(key.read_dtype is not None):
            codes = tensors.pool.copy.codes
            read_at = address(codes, codes.element_type.width // 8, slot, head, place.first_row)
        # As in `step.step_kernel`: rows that only read leave L2 to what is written (batch 256, T = 8: 286 -> 282 us).
        policy = select(cursor.folds, Int64(EVICT_NORMAL), Int64(EVICT_FIRST))
        bulk_load(thread, shared.state, read_at, shared.arrival, policy, tile.bytes)
        cute.arch.barrier()
        loads = WindowLoads.start(cta, cursor)
        if cutlass.const_expr(key.rows.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        draft = Draft.of(cta, early, loads.decays)
        if cutlass.const_expr(tile.channels):
            stage_channels(cta, cursor, early, loads.decays)
            cute.arch.barrier()
        else:
            append_decays(cta, cursor, draft.gate)
        score_records(cta, cursor, early, loads, draft)
        cute.arch.barrier()
        bulk_wait(shared.arrival)
        read_rows(cta, cursor, early, loads, draft)
        if cursor.folds:
            cute.arch.barrier()
            fold_records(tensors.pool, key, place, cursor, draft.decays.records, cta.memory, tile_at)
            if cutlass.const_expr(key.read_dtype is not None):
                cute.arch.barrier()  # a warp encodes rows that others have folded
                write_copy(cta, cursor)
