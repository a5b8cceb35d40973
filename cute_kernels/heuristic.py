"""Which step kernels there are, and which launch parameters one takes that nobody has measured."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from cute_kernels.arch import TENSOR_COLUMNS, Arch
from cute_kernels.configs import ROW_BLOCK, TERMS, KdaOptions, Precision, Readout, StepConfig, StepKey, Tile
from cute_kernels.draft_shape import DraftShape
from cute_kernels.operands import OperandShape, unfit_reason

LARGEST_TILE_BYTES, LARGEST_WHOLE_TILE_BYTES = 40 * 1024, 64 * 1024
MULTIPROCESSOR_SMEM_BYTES, RESERVED_SMEM_BYTES = 228 * 1024, 1024  # of sm_90 to sm_103; the latter of each CTA
MULTIPROCESSOR_THREADS, MULTIPROCESSOR_CTAS = 2048, 32
MULTIPROCESSOR_REGISTERS, HELD_REGISTERS, LONE_REGISTERS = 65536, 128, 160  # the latter two of a thread
SCHEDULERS = 4  # of a multiprocessor
DRAWING_REGISTERS = 64  # likewise, of a step that rounds stochastically
CHANNEL_CTAS, LONG_CHANNEL_CTAS = 4, 2  # of a recurrence whose channels decay by themselves; with more than 16 records
CHANNEL_DRAFT_CTAS, LONG_CHANNEL_DRAFT_CTAS, LONG_KEY_CTAS = 4, 3, 3  # likewise, of several tokens; of long keys
FEW_CTAS, MANY_CTAS = 264, 1584  # 2 and 12 on each of an H200's multiprocessors
# Of heads that share a CTA, by bits of the copy and by one or several tokens: how many, and the registers that a thread
# is held to. Those of one token and a copy of 8 bits take 128 by themselves, and held to them they spill.
SHARED_HEADS = {(4, True): (4, 80), (4, False): (4, 96), (8, True): (2, None), (8, False): (2, 146)}
SHARED_FOLD_VALUES = 16  # state values that a fold of theirs takes at a time


def smem_bytes(key: StepKey) -> int:
    """Shared memory of a CTA, and some for alignment."""
    tile, shape = Tile.of(key), DraftShape.of(key)
    if not key.drafts:
        return tile.smem_bytes
    if shape.tensor:
        return OperandShape.of(key).bytes + shape.staging_bytes(tile) + 16
    tiles = 0 if key.direct else shape.heads * tile.bytes
    return tiles + shape.scale_bytes + shape.staging_bytes(tile) + 16


def room(key: StepKey) -> int:
    """CTAs that a multiprocessor has threads, shared and tensor memory for, and takes at all."""
    by_memory = MULTIPROCESSOR_SMEM_BYTES // (smem_bytes(key) + RESERVED_SMEM_BYTES)
    if key.tensor:
        by_memory = min(by_memory, TENSOR_COLUMNS // OperandShape.of(key).columns)
    return max(1, min(by_memory, MULTIPROCESSOR_THREADS // key.threads, MULTIPROCESSOR_CTAS))


def room_within(key: StepKey, registers: int) -> int:
    """The same with so many registers a thread."""
    return max(1, min(room(key), MULTIPROCESSOR_REGISTERS // (key.threads * registers)))


def invalid_reason(key: StepKey, arch: Arch) -> str | None:
    """Why this key has no kernel on this architecture, or None: the one statement of what steps support."""
    if key.d_state not in (64, 128, 256):
        return f"d_state: supported are 64, 128 and 256, got {key.d_state}"
    if key.head_dim not in (64, 80, 128):
        return f"head_dim: supported are 64, 80 and 128, got {key.head_dim}"
    if not 1 <= key.num_v_heads <= 256:
        return f"num_v_heads: supported are 1 to 256, got {key.num_v_heads}"
    config, tile = key.config, Tile.of(key)
    most = (1, 2, 4, 8) if key.drafts else (4, 8)
    if config.warps not in most:
        return f"warps: supported are {', '.join(map(str, most))}, got {config.warps}"
    if key.head_dim % config.split or tile.rows % ROW_BLOCK:
        return f"split: {key.head_dim} rows do not split into {config.split} parts of whole {ROW_BLOCK}s"
    if not key.drafts and tile.rows % tile.readout_rows:
        return f"warps: {tile.rows} rows are not a multiple of those that {config.warps} warps take at once"
    if config.heads < 1 or (key.num_v_heads // key.num_k_heads) % config.heads:
        return f"heads: {key.num_v_heads // key.num_k_heads} of a key head do not go by {config.heads}"
    if config.heads > 1 and (config.split > 1 or key.read_dtype is None or key.tensor or tile.channels):
        return (
            "heads: supported is 1 where heads are split, no copy is read, tcgen05 reads or channels decay by "
            f"themselves, got {config.heads}"
        )
    if config.heads * config.warps > most[-1]:
        return f"heads: a CTA has up to {most[-1]} warps, got {config.heads} heads of {config.warps}"
    if config.precision not in TERMS:
        return f"precision: supported are {', '.join(TERMS)}, got {config.precision}"
    if config.readout not in get_args(Readout):
        return f"readout: supported are {', '.join(get_args(Readout))}, got {config.readout}"
    if key.tensor and (reason := unfit_reason(key, arch.tensor_columns)):
        return reason
    needed = smem_bytes(key)
    if needed > arch.smem_bytes:
        return f"shared memory: {needed} bytes, {arch.name} has {arch.smem_bytes}; raise split"
    return None


def held_registers(key: StepKey) -> int | None:
    """The registers that a thread of a step on tensor cores is held to, or None: see `heuristic_config`."""
    tile, floats = Tile.of(key), "float32" in (key.activation_dtype, key.record_dtype)
    if key.read_dtype is None:
        if tile.channels or key.activation_dtype != "bfloat16" or floats or key.num_tokens == 1:
            return None
        if key.num_tokens * key.probes > 16:
            return LONE_REGISTERS if tile.read_bits == 16 and key.window > ROW_BLOCK else None
        if key.probes == 2:
            few = tile.read_bits == 32 and key.window <= 2 * ROW_BLOCK
            return LONE_REGISTERS if few else HELD_REGISTERS if DraftShape.of(key).halves else None
        return LONE_REGISTERS if tile.read_bits == 32 or key.window > 2 * ROW_BLOCK else HELD_REGISTERS
    if tile.channels:
        kimi = tile.rows == 128 and key.d_state <= 128 and not floats
        short = key.num_tokens <= 4 and (key.window == ROW_BLOCK or (key.window < ROW_BLOCK and tile.read_bits == 16))
        return {4: LONE_REGISTERS, 16: HELD_REGISTERS}.get(tile.read_bits) if kimi and short else None
    if DraftShape.of(key).halves and key.read_dtype == "float8_e4m3fn":
        return LONE_REGISTERS if key.probes == 2 and not floats else None
    return HELD_REGISTERS if key.read_dtype == "nvfp4" and key.probes == 1 and key.num_tokens > 1 else None


def sharing_heads(key: StepKey, batch: int, arch: Arch) -> StepKey | None:
    """The same with several heads a CTA, or None where that does not pay: see `heuristic_config`."""
    heads, registers = SHARED_HEADS.get((Tile.of(key).read_bits, key.num_tokens == 1), (1, None))
    if key.read_dtype is None or key.probes > 1 or key.window > ROW_BLOCK or heads == 1 or key.config.warps > 1:
        return None
    candidate = replace(key, config=replace(key.config, heads=heads, fold_values=SHARED_FOLD_VALUES))
    if invalid_reason(candidate, arch) or batch * candidate.row_ctas < MANY_CTAS:
        return None
    if key.read_dtype == "nvfp4" and key.window < ROW_BLOCK:
        registers = None  # held to them it would spill: Super folded in 2.0 ms at a window of 8
    ctas = 1 if registers is None else room_within(candidate, registers)
    return replace(candidate, config=replace(candidate.config, ctas=ctas))


def on_tensor_memory(key: StepKey, batch: int, arch: Arch) -> StepKey | None:
    """The same with the readout of tcgen05 and as few warps a head as fit, or None if it does not serve the key.

    A CTA has then up to 64 KiB of the state: two or three of them on a multiprocessor have most of it under way. Heads
    of NVFP4 take fewer warps than mma.sync gives them where there are many, since conversions of probes are shared by
    more of them (GDN 122B, batch 256, 8 tokens: 84 us with 1 warp, 97 with 2, predicted for B300).
    """
    many = key.read_dtype == "nvfp4" and batch * key.num_v_heads >= FEW_CTAS
    for warps in (1, 2, 4):
        candidate = replace(key, config=replace(key.config, warps=warps, readout="tcgen05"))
        small = candidate.heads_together * Tile.of(candidate).bytes <= LARGEST_WHOLE_TILE_BYTES
        if invalid_reason(candidate, arch) or not small:
            continue
        if warps >= key.config.warps or (many and room(candidate) > 1):
            return candidate
    return None


def heuristic_config(key: StepKey, batch: int, arch: Arch) -> StepConfig | None:
    """A configuration without a measurement of the shape; None if no split makes the tile fit.

    One CTA a head, unless its tile would leave room for few on a multiprocessor. Splitting heads further does not pay
    even where most multiprocessors stay idle: 16 to 128 heads at batch 1 to 8 took as long or longer with 2 or 4 CTAs a
    head, since each repeats the work on the window (H200, 2026-11-29, docs/performance.md). Where channels decay by
    themselves that work is so much that larger tiles are better (GLM-5.3-Flash, batch 256: 294 -> 281 us, of 8 tokens
    660 -> 503; this and what follows H200, 2026-11-30), but for one token and fewer heads than multiprocessors (Kimi-K3
    by 8, batch 1: 6.5 -> 5.9, folds 10.4 -> 7.6).

    Products on tensor cores take few warps, since all of them wait for the scores of all: 32 rows a warp, 64 of codes
    (Super, batch 256, 8 tokens: 321 us with 4 warps, 286 with 2), but 16 where there is no other CTA to fill a
    multiprocessor (Super, NVFP4, batch 1: 6.7 -> 6.1). 128 rows of a delta rule with an NVFP4 copy would spill, and are
    faster only as long as no row folds (GDN 122B: 85 us with 2 warps, 76 with 1, but 135 with 2 where 1 row in 16
    folds, more with 1). Products are more precise than what is made of them: see `StepConfig.precision`.

    A CTA takes one head, but of Mamba-2 with small copies several where there are many: they score the records once,
    and a fold of 16 values at a time leaves registers for more of them (Super, batch 256, NVFP4, with 1 row in 16
    folding 125 -> 114 us, of 8 tokens 155 -> 147, FP8 133 -> 128, of 4 tokens 201 -> 198; at batch 32 17 -> 27).

    The compiler is told how many CTAs to leave room for where the registers that this allows made a step faster: with
    decays by channel one token, but not where tiles leave room for few anyway (GLM-5.3-Flash in bfloat16: 184 -> 170
    us; in float32 280.8 -> 282.1, 2026-12-01), and up to 8 of any state that no copy stands for (`StepKey.direct`),
    fewer at windows beyond 16 and none at shorter ones, which would spill (8 tokens at a window of 8 folded in 1870
    us); several tokens of Mamba-2 with a 16-bit state (Super: 167 -> 164; folds 370 -> 347) or an NVFP4 copy (100 ->
    95); of a float32 state with room for fewer than the compiler would make room for (16 tokens at a window of 32: 340
    -> 337); Kimi Delta Attention with copies (GLM-5.3-Flash, NVFP4, one token: 199 -> 168 us, 4 tokens 274 -> 269); and
    Gated DeltaNet with a float16 state (Qwen3.5-122B, 4 and 8 tokens: 187 -> 161, 210 -> 181) or several tokens and an
    FP8 copy (4 and 8: 125 -> 108, 143 -> 121).

    Stochastic rounding takes a 16-bit step of Mamba-2 from 62 to 66 registers, which leave room for a CTA fewer. Told
    to leave room for 8, the compiler keeps to 64, without spills (sm_90a, compiled 2026-11-30, not timed).

    Where the architecture has tcgen05 and it serves the key, it reads the state of several tokens, and copies
    (docs/blackwell.md).

    A fold takes 32 values at a time: with 16 it splits weighted values into terms twice as often (Super, 8 tokens, in
    bfloat16, batch 256: 387 -> 377 us), with 64 a 16-bit state has fewer CTAs. Several tokens of a float32 state take
    64 (Super, 8 tokens, 28 records: 728 -> 703 us), rows of 256, keys of float32 and what rounds stochastically 16.
    """
    floats = "float32" in (key.activation_dtype, key.record_dtype)
    precision: Precision = "fp32" if floats else "tf32"
    channels, nvfp4 = isinstance(key.options, KdaOptions), key.read_dtype == "nvfp4"
    draws = key.rounding == "stochastic" and key.probes == 1 and not key.drafts
    fold_values = 16 if key.d_state > 128 or key.activation_dtype == "float32" or draws else 32
    if key.drafts and not channels and key.read_dtype is None and key.checkpoint_dtype == "float32":
        fold_values *= 2
    lone = channels and not key.drafts and key.num_tokens == 1 and key.checkpoint_dtype == "float32"
    few = batch * key.num_v_heads < FEW_CTAS // 2
    for split in (2, 4, 5, 8) if lone and few else (1, 2, 4, 5, 8):
        candidate = replace(key, config=StepConfig(split, fold_values=fold_values, precision=precision))
        tile = Tile.of(candidate)
        if key.drafts:
            rows = 32 if tile.read_bits >= 16 else 64
            if nvfp4 and key.probes == key.num_tokens == 1 and batch * key.num_v_heads < FEW_CTAS:
                rows = ROW_BLOCK
            warps = 1 << max(0, (tile.rows // rows).bit_length() - 1)
            candidate = replace(candidate, config=replace(candidate.config, warps=warps))
            candidate = on_tensor_memory(candidate, batch, arch) or candidate
            tile = Tile.of(candidate)
        whole = channels or candidate.tensor
        most = LARGEST_WHOLE_TILE_BYTES if whole else LARGEST_TILE_BYTES
        if tile.bytes > most or invalid_reason(candidate, arch):
            continue
        if key.drafts:
            held = held_registers(candidate)
            ctas = 1 if held is None else room_within(candidate, held)
            if not channels and ctas < room(candidate):
                alike = max(1, SCHEDULERS // tile.warps)  # each has registers of its own
                ctas = max(1, ctas // alike * alike)
            if (
                candidate.direct
                and key.num_tokens <= 8
                and key.d_state <= 128
                and key.window >= ROW_BLOCK
                and not floats
            ):
                most = CHANNEL_DRAFT_CTAS if key.window == ROW_BLOCK else LONG_CHANNEL_DRAFT_CTAS
                ctas = min(most, room(candidate))
            ctas = 1 if candidate.tensor else ctas
            if shared := sharing_heads(candidate, batch, arch):
                return shared.config
        elif draws:
            ctas = room_within(candidate, DRAWING_REGISTERS)
        else:
            most = CHANNEL_CTAS if key.window <= ROW_BLOCK else LONG_CHANNEL_CTAS
            if key.d_state > 128:
                most = min(most, LONG_KEY_CTAS)
            elif floats or (key.window <= ROW_BLOCK and split == 1 and tile.bytes == LARGEST_WHOLE_TILE_BYTES):
                most = 1
            ctas = min(most, room(candidate)) if channels else 1
        return replace(candidate.config, ctas=ctas)
    return None
