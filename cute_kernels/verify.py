"""The step of one layer for several tokens a row, or of one token that reads a copy, on tensor cores (`replay.draft`).

A CTA works on `Tile.rows` rows of one head of one row of the batch:

1. start the loads that need neither slot nor cursor: gates, queries and keys, the tokens' values;
2. load slot and cursor, start the bulk copy of its tile of the checkpoint, or of the codes of the read copy, then the
   loads of the window's records (`StepKey.direct`: no tile is copied, lanes load it in 4);
3. score the records with the tokens, each warp some of them, and append the tokens' keys and decays;
4. after a barrier each warp multiplies its rows of the tile by all probes at once, adds the window's part, and, under a
   delta rule, solves for the tokens' records; it writes outputs and appends values;
5. a row that folds then folds its committed records into the tile and writes it back: outputs never wait for that. With
   a read copy it folds them into the checkpoint in global memory, of which it then makes the copy anew.

Several heads of a key head may share a CTA (`StepConfig.heads`), each with warps of its own: the scores of 3 are made
once, of the records by all warps, and each head weighs them.

The committed records are read the same way whether a row folds or not, and an append lands outside of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels import products
from cute_kernels.args import StepTensors
from cute_kernels.configs import ROW_BLOCK, SIZE_BYTES, UNCUT, Tile
from cute_kernels.copy_shape import TILE_ROWS, CopyShape
from cute_kernels.draft_loads import (
    Draft,
    HeadLoads,
    ProbeParts,
    WindowLoads,
    load_keys,
    load_probes,
    staged_blocks,
)
from cute_kernels.draft_shape import DraftShape
from cute_kernels.drafts import Cta
from cute_kernels.operands import OperandShape
from cute_kernels.primitives.arithmetic import LOG2_E, at_most, exp2, select
from cute_kernels.primitives.bulk import bulk_init, bulk_load, bulk_wait
from cute_kernels.primitives.control import barrier_of_zero, when
from cute_kernels.primitives.convert import pack, unpack
from cute_kernels.primitives.memory import EVICT_FIRST, EVICT_NORMAL, load_shared_floats, store_words_if
from cute_kernels.primitives.mma import Fragment, float_fragment, lower_halves, mma_bf16, multiply, upper_halves
from cute_kernels.primitives.reduce import transposing_sum
from cute_kernels.records import LaneDecays, TileMemory, fold_staged, stage_fold
from cute_kernels.recurrences.base import Gate
from cute_kernels.replay.channels import own_channels
from cute_kernels.replay.codes import PROBE_SCALE, scales_probes
from cute_kernels.replay.cursor import RowCursor, is_padding, load_force, load_slot, load_span
from cute_kernels.replay.delta import correction
from cute_kernels.replay.draft import StateProbes, StateRows
from cute_kernels.replay.fold import FoldStage, fold_tile
from cute_kernels.replay.lanes import LONE_LANES, Channels
from cute_kernels.replay.noise import Noise
from cute_kernels.replay.quant import CopyPlaces, clear_scales, encode_rows, scale_at
from cute_kernels.replay.window import Place, address, store_scalar_if
from cute_kernels.scoring import Scoring


def stage_channels(cta: Cta, cursor: RowCursor, early: HeadLoads, records: Any) -> None:
    """Stage the decays by channel, append the tokens', and sum the tokens' scores with each other over channels."""
    policy: Any = cta.policy
    place, tokens = cta.place, cta.shape.tokens
    decays = [[policy.log_decay(token.gate, early.gate) for token in channel] for channel in early.channels]
    left = [[exp2(x * Float32(LOG2_E)) for x in channel] for channel in decays]
    whole = records.stage_draft(cta.tile, place, left, cta.memory.staging, cta.shape.score_scale)
    stage_probes(cta, early, left, whole)
    for t in range(tokens):
        of_token = [channel[t] for channel in decays]
        ring, dtype, valid = cta.tensors.pool.decay, cta.key.decay_dtype, cta.is_token(t)
        records.append(ring, dtype, cta.tile, place, cursor, of_token, ahead=t, valid=valid)
    keys: list[list[Any]] = [[] for _ in left]  # of a channel, those of the tokens so far as they have decayed
    sums: list[Any] = []
    for later in range(tokens):
        found = [Float32(0.0)] * (2 * later + 1)
        for of_keys, channel, of_channel in zip(keys, early.channels, left, strict=True):
            of_keys[:] = [key * of_channel[later] for key in of_keys] + [channel[later].key]
            met = [channel[later].query * key for key in of_keys] + [channel[later].key * key for key in of_keys[:-1]]
            found = [x + y for x, y in zip(found, met, strict=True)]
        sums += found
        cta.scores.store_sums(sums, (later + 1) ** 2, place.warp, last=later + 1 == tokens)


def stage_probes(cta: Cta, early: HeadLoads, left: list[list[Any]], whole: list[Any]) -> None:
    """Stage this thread's channels of every probe, decayed since the start of the window; zeros where no token is.

    Args:
        left, whole: of each channel what the decay of each token leaves, and that of the whole window.
    """
    shape, staged = cta.shape, cta.staged
    apart = shape.token_blocks * shape.block_vectors
    scaled = scales_probes(cta.key.read_dtype or "", lone=shape.lone)
    scale = Float32(PROBE_SCALE if scaled else UNCUT if shape.state_tf32(cta.tile) and not shape.tensor else 1.0)
    for own, decay, channel, of_channel in zip(
        own_channels(cta.tile, cta.place.thread), whole, early.channels, left, strict=True
    ):
        so_far = decay * scale
        for t in range(apart):
            pair = [Float32(0.0)] * 2
            if t < shape.tokens:
                so_far = so_far * of_channel[t]
                pair = [channel[t].query * so_far, channel[t].key * so_far]
            staged.store(t, *own, pair, apart, cta.terms)


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


def read_head(
    cta: Cta, cursor: RowCursor, early: HeadLoads, loads: WindowLoads, draft: Draft, probes: StateProbes
) -> None:
    """This warp's rows of all outputs of a head, and of the tokens' values, once the tile is there."""
    read = read_lone if cta.shape.lone else read_rows
    read(cta, cursor, early, loads, draft, probes)


def read_rows(
    cta: Cta, cursor: RowCursor, early: HeadLoads, loads: WindowLoads, draft: Draft, probes: StateProbes
) -> None:
    """`read_head` of several tokens."""
    shape, scores = cta.shape, cta.scores
    factors = draft.column_factors()
    if shape.tensor:
        found = products.sums(cta, cursor, factors)
    else:
        found = state_rows(cta, cursor, loads).products(probes)
        for readouts in found:
            for b, of_block in enumerate(readouts):
                readouts[b] = [x * factors[b][j % 2] for j, x in enumerate(of_block)]
    found = add_window(cta, cursor, loads, found)
    tokens = cta.own(0)[: 2 * shape.token_blocks]
    made: list[Any] = [[] for _ in tokens]
    appended: list[Any] = [[] for _ in tokens]
    for i, readouts in enumerate(found):
        epilogues = [[cta.policy.epilogue(None)] * 2 for _ in tokens]
        if early.epilogues:
            loaded = [unpack(of_token[i], cta.key.activation_dtype) for of_token in early.epilogues]
            epilogues = [[cta.policy.epilogue(x) for x in pair] for pair in loaded]
        if cta.policy.value_needs_state:
            right = []
            for b in range(shape.token_blocks):
                strengths = draft.in_columns(draft.gate.strength, b)
                of_keys = readouts[shape.token_blocks + b]
                right.append([strengths[j % 2] * epilogues[2 * b + j % 2][j // 2] - of_keys[j] for j in range(4)])
            records, outputs = scores.solve(right, readouts[: shape.token_blocks])
            for n in range(len(tokens)):
                appended[n].append(pack([records[n // 2][n % 2 + 2 * c] for c in (0, 1)], cta.key.record_dtype))
        else:
            outputs = add_tokens(cta, [of_token[i] for of_token in early.values], readouts)
        for n in range(len(tokens)):
            pair = [cta.policy.finish(outputs[n // 2][n % 2 + 2 * c], epilogues[n][c]) for c in (0, 1)]
            made[n].append(pack(pair, cta.key.activation_dtype))
    channel = cta.place.first_row + cta.channels.first
    for n, token in enumerate(tokens):
        record = appended[n] if cta.policy.value_needs_state else early.values[n]
        cta.channels.store(cta.is_token(token), cta.value_place(cursor, cursor.count + token, channel), record)
        where = cta.input_place(cta.tensors.out, token, cta.place.head, channel)
        cta.channels.store(cta.is_token(token), where, made[n])


def first_scales(cta: Cta, cursor: RowCursor) -> Int64:
    """Where the scales begin of the blocks of the copy that the CTA reads, whole atoms."""
    first = cta.first_head * cta.key.head_dim
    return CopyPlaces.of(cta.tensors.pool.copy, cursor.slot).scale + Int64(scale_at(CopyShape.of(cta.key), first, 0))


def state_rows(cta: Cta, cursor: RowCursor, loads: WindowLoads) -> StateRows:
    """This lane's rows of the tile."""
    dtype, scales, direct = cta.key.state_dtype, loads.scales, cta.key.direct
    if cta.shape.scale_bytes and scales is not None:
        scales = staged_blocks(cta, scales)
    state = cta.source(cursor.slot) if direct else cta.memory.state
    return StateRows(dtype, cta.tile, state, cta.channels.pairs, scales, cta.place.lane, direct)


def over_window(
    cta: Cta, cursor: RowCursor, sums: list[Any], added: Callable[[int, list[Any]], list[Any]]
) -> list[Any]:
    """What `added` makes of the sums, 16 records after 16; records behind the last 16 live ones are left out (which
    scores of them are not made)."""
    groups, sums = cta.shape.window_columns // ROW_BLOCK, added(0, sums)
    if groups == 1:
        return sums
    held = cute.make_rmem_tensor((len(sums),), Float32)

    def hold(sums: list[Any]) -> None:
        for n, x in enumerate(sums):
            held[n] = x

    def taken() -> list[Any]:
        return [held[n] for n in range(len(sums))]

    def add(group: int) -> None:
        hold(added(group, taken()))

    hold(sums)
    for group in range(1, groups):
        when(cursor.count > ROW_BLOCK * group, functools.partial(add, group))
    return taken()


def add_window(cta: Cta, cursor: RowCursor, loads: WindowLoads, products: list[Any]) -> list[Any]:
    """The products, [16 rows][probe block][4], with the window's part."""
    blocks = cta.shape.probe_blocks

    def added(group: int, sums: list[Any]) -> list[Any]:
        window = [cta.scores.load(b, 16 * group, cta.terms) for b in range(blocks)]
        found = []
        for i, values in enumerate(loads.values):
            upper, lower = value_fragments(values[group], cta.key.record_dtype, cta.terms)
            for b, scores in enumerate(window):
                start = (i * blocks + b) * 4
                found += multiply(sums[start : start + 4], upper, lower, scores, cta.terms)
        return found

    sums = over_window(cta, cursor, [x for of_rows in products for block in of_rows for x in block], added)
    parts = [sums[i : i + 4] for i in range(0, len(sums), 4)]
    return [parts[i : i + blocks] for i in range(0, len(parts), blocks)]


def add_tokens(cta: Cta, words: list[list[Uint32]], readouts: list[list[Any]]) -> list[list[Any]]:
    """Outputs with what the tokens' own values add, which are inputs."""
    half = cta.shape.token_blocks == 1
    upper, lower = value_fragments(words, cta.key.activation_dtype, cta.terms)
    for b in range(cta.shape.token_blocks):
        own = cta.scores.load(b, cta.shape.window_columns, cta.terms, half=half)
        readouts[b] = multiply(readouts[b], upper, lower, own, cta.terms)
    return readouts


def read_lone(
    cta: Cta, cursor: RowCursor, early: HeadLoads, loads: WindowLoads, draft: Draft, probes: StateProbes
) -> None:
    """`read_head` of one token: its scores are not weighed yet, and what lanes have of sums is added last."""
    policy, key, decays = cta.policy, cta.key, draft.decays
    products = state_rows(cta, cursor, loads).lone_products(probes)
    window = lone_window(cta, cursor, loads, decays.records.weights)
    own_score = load_shared_floats(cta.scores.base + cta.shape.window_columns * 4, 1, 4)[0]
    answers = []
    for factor, of_probe, of_window in zip(draft.factors, products, window, strict=True):
        sums = [x * decays.records.window + y for x, y in zip(of_probe, of_window, strict=True)]
        since = factor[0] * decays.since_window
        answers.append([x * since for x in transposing_sum(sums, cta.place.lane, LONE_LANES)])
        own_score = own_score * factor[0]
    lone, epilogues = cta.lone, [policy.epilogue(None)] * len(answers[0])
    if early.epilogues:
        epilogues = [policy.epilogue(x) for x in lone.unpacked(early.epilogues[0], key.activation_dtype)]
    if policy.value_needs_state:
        solved = [
            correction([query, of_key], value, draft.gate.strength, own_score)
            for query, of_key, value in zip(*answers, epilogues, strict=True)
        ]
        outputs, record = [x for x, _ in solved], [y for _, y in solved]
    else:
        record = lone.unpacked(early.values[0], key.activation_dtype)
        weight = own_score * decays.token_weight + draft.gate.skip
        outputs = [x + value * weight for x, value in zip(answers[0], record, strict=True)]
    valid = cta.is_token(Int32(0))
    channel = cta.place.first_row
    lone.store(valid, cta.value_place(cursor, cursor.count, channel), record, key.record_dtype)
    finished = [policy.finish(x, y) for x, y in zip(outputs, epilogues, strict=True)]
    where = cta.input_place(cta.tensors.out, 0, cta.place.head, channel)
    lone.store(valid, where, finished, key.activation_dtype)


def lone_window(cta: Cta, cursor: RowCursor, loads: WindowLoads, weights: list[Any]) -> list[list[Float32]]:
    """Of each probe, this lane's part of the window's answer by row, see `StateRows.lone_products`."""

    def added(group: int, sums: list[Any]) -> list[Any]:
        right, found = cta.scores.lone_weights(16 * group, weights, cta.terms), []
        for i, values in enumerate(loads.values):
            of_rows = sums[4 * i : 4 * i + 4]
            upper, lower = value_fragments(values[group], cta.key.record_dtype, cta.terms)
            for (a0, a2), (a1, a3) in zip(upper[0], lower[0], strict=True):
                of_rows = mma_bf16(of_rows, (a0, a1, a2, a3), right)
            found += of_rows
        return found

    sums = over_window(cta, cursor, [Float32(0.0)] * (4 * len(loads.values)), added)
    return [
        [x for i in range(0, len(sums), 4) for x in cta.scores.lone_sums(probe, sums[i : i + 4])]
        for probe in range(cta.shape.probes)
    ]


@cute.jit
def write_copy(cta: Cta, cursor: RowCursor, part: Int32, parts: cutlass.Constexpr):
    """Make the copy of a part of this CTA's rows from the checkpoint, 16 rows a warp; with its last part the last CTA
    clears padding scales."""
    key, shape = cta.key, CopyShape.of(cta.key)
    state = address(cta.tensors.pool.checkpoint, SIZE_BYTES[key.checkpoint_dtype], cursor.slot)
    places = CopyPlaces.of(cta.tensors.pool.copy, cursor.slot)
    first, tiles = cta.rows_before(cta.place.head), cta.tile.rows // TILE_ROWS // parts
    for tile in cutlass.range(part * tiles + cta.place.warp, (part + 1) * tiles, cta.tile.warps, unroll=1):
        encode_rows(shape, state, places, first + tile * TILE_ROWS, cta.place.lane)
    if cutlass.const_expr(shape.tiles * TILE_ROWS > shape.rows):
        if (first + cta.tile.rows == shape.rows) & (part + 1 == parts):
            for tile in cutlass.range(shape.rows // TILE_ROWS + cta.place.warp, shape.tiles, cta.tile.warps, unroll=1):
                clear_scales(shape, places, tile * TILE_ROWS, cta.place.lane)


@cute.jit
def fold_and_copy(
    cta: Cta,
    cursor: RowCursor,
    stage: FoldStage,
    decays: cute.Tensor,
    noise: Noise | None,
    to: Int64,
    statics: cutlass.Constexpr,
):
    """Fold staged records into the checkpoint at `to` part by part, and make the copy of each while L2 has it: the
    tiles of all CTAs together are more than fits there."""
    for part in cutlass.range(statics.parts, unroll=1):
        fold_tile(stage, statics, cta.memory.state, to, cursor.count, decays, None, noise, part)
        cute.arch.sync_warp()  # a lane encodes what others of its warp have folded
        write_copy(cta, cursor, part, statics.parts)


def state_probes(cta: Cta, probes: list[list[list[Uint32]]], scales: list[Float32]) -> StateProbes:
    """What `load_probes` loaded, or where channels decay what is staged of it, as registers meet the state."""
    vectors: Any = cta.staged if cta.shape.channels else cta.probes(probes)
    return StateProbes(vectors, cta.key.state_dtype, cta.terms, cta.shape.lone, cta.shape.state_tf32(cta.tile), scales)


def fold_head(cta: Cta, cursor: RowCursor, decays: LaneDecays, memory: TileMemory) -> None:
    """Fold the committed records of a head, and make its copy anew."""
    pool, key, place = cta.tensors.pool, cta.key, cta.place
    size, lifts = SIZE_BYTES[key.checkpoint_dtype], cta.shape.lifted_bytes(cta.tile) > 0
    if not cta.shape.tensor and not lifts:  # `products.finish` has a barrier, and rows are lifted in front of one
        cute.arch.barrier()
    to = address(pool.checkpoint, size, cursor.slot, place.head, place.first_row)
    fold = stage_fold(pool, cta.tensors.cursors, key, place, cursor, decays, memory, to, lifts=lifts)
    if key.read_dtype is None:
        fold_staged(fold, memory.state, to, cursor.count, Int32(0))
    else:
        fold_and_copy(cta, cursor, fold.stage, fold.decays, fold.noise, to, fold.statics)


@cute.kernel
def verify_kernel(tensors: StepTensors, total: Int32, pad_slot: Int32, key: cutlass.Constexpr):
    """One CTA: see this module's docstring, and `step.step_kernel` for the order of its loads.

    `total` is the extent of the inputs' token axis.
    """
    tile, shape = Tile.of(key), DraftShape.of(key)
    _, row, _ = cute.arch.block_idx()
    place = Place.of(key, Int32(0) if key.rows.has_cu_seqlens else row)
    thread, head = place.thread, place.head
    heads = shape.heads
    tiles_bytes = 0 if key.direct else heads * tile.bytes
    copied, alignment = (OperandShape.of(key).bytes, 1024) if shape.tensor else (tiles_bytes + shape.scale_bytes, 128)
    shared = TileMemory.in_one(copied, shape.staging_bytes(tile), alignment)
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
    if cutlass.const_expr(heads > 1):
        memory = replace(memory, staging=shared.staging + head % heads * shape.head_bytes(tile))
        if cutlass.const_expr(not shape.tensor):
            memory = replace(memory, state=shared.state + head % heads * tile.bytes)
    cta = Cta(tensors, key, place, Channels.of(tile, place, tensor=shape.tensor), first_token, num_tokens, memory)
    probes = load_probes(cta)
    parts = ProbeParts.of(cta, probes)
    early = HeadLoads.start(cta)
    bulk_init(cute.arch.thread_idx()[0], shared.arrival, 2 if shape.scale_bytes else 1)
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
        # As in `step.step_kernel`: rows that only read leave L2 to what is written (batch 256, T = 8: 286 -> 282 us).
        policy = select(cursor.folds, Int64(EVICT_NORMAL), Int64(EVICT_FIRST))
        if cutlass.const_expr(shape.tensor):
            rows = products.start(cta, cursor, cta.source(cursor.slot), policy)
        elif cutlass.const_expr(not key.direct):
            source, first = cta.source(cursor.slot), cute.arch.thread_idx()[0]
            bulk_load(first, shared.state, source, shared.arrival, policy, tiles_bytes)
            if cutlass.const_expr(shape.scale_bytes > 0):
                source = first_scales(cta, cursor)
                bulk_load(first, shared.state + tiles_bytes, source, shared.arrival, policy, shape.scale_bytes)
        cute.arch.barrier()
        keys = load_keys(cta, cursor)
        folding = memory
        if cutlass.const_expr(shape.folds_over_tiles):
            folding = replace(memory, staging=shared.state + head % heads * tile.staging_bytes)
        elif cutlass.const_expr(shape.lifted_bytes(tile) > 0):
            folding = replace(memory, staging=memory.staging - shape.lifted_bytes(tile))
        loads = WindowLoads.start(cta, cursor)
        # Where channels decay much is computed before any score: a barrier of all loads costs more than it brings.
        zero = Float32(0.0) if tile.channels else barrier_of_zero()
        if cutlass.const_expr(key.rows.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(tile.read_bits == 32 and not tile.channels):
            # Else the gate may wait for its own loads in front of later ones, which happens with float32 states (5
            # tokens of Super, batch 256: 288 -> 272 us); with less to read it pays to start early (Qwen3.5-122B in
            # bfloat16, 8 tokens: 183 -> 177; H200, 2026-11-30).
            early = replace(early, gate=tuple(None if x is None else x + zero for x in early.gate))
        factors, scales = parts.factors(cta), parts.scales(cta)
        draft, scoring = Draft.of(cta, early, loads.decays, factors), Scoring(cta, cursor, probes, factors)
        if cutlass.const_expr(tile.channels):
            stage_channels(cta, cursor, early, loads.decays)
            cute.arch.barrier()
        else:
            append_decays(cta, cursor, draft.gate)
        scoring.score(keys, zero, None if shape.lone or shape.keeps_raw else draft)
        if cutlass.const_expr(shape.tensor):
            products.stage(cta, probes)
            products.arrive(cta, rows)
        cute.arch.barrier()
        if cutlass.const_expr(shape.tensor):
            products.multiply(cta, shared.arrival)
        if cutlass.const_expr(shape.keeps_raw):
            scoring.weigh(draft)
            cta.sync()
        if cutlass.const_expr(not key.direct):
            bulk_wait(shared.arrival)
        read_head(cta, cursor, early, loads, draft, state_probes(cta, probes, scales))
        if cutlass.const_expr(shape.tensor):
            folding = products.finish(cta)
        if cursor.folds:
            fold_head(cta, cursor, draft.decays.records, folding)
