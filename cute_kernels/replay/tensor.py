"""Readout on tensor memory: the state and the probes as operands of tcgen05, and the sums as every warp takes them.

A row of the state goes to where a warp finds it in its quarter of tensor memory as `StateRows` would give it: in part i
of n lanes g and g + 8 of 16 hold rows 2 n g + 2 i and the next of the warp's. So what follows, from the window to the
appends, is the same code, and the rows of a thread are neighbours. Rows of the state are copied in 16-byte pieces, each
to its place in a swizzled operand; codes and scales are not touched.

| state | what threads do to it |
|---|---|
| bfloat16, float16, nvfp4 | nothing |
| float32 | nothing; where two terms are asked for, each splits what it has copied |
| nvfp4, decoded | each makes bfloat16 of the codes of a row, and stores them to its lane of tensor memory |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.configs import TENSOR_WARPS, WARP
from cute_kernels.copy_shape import ATOM_BLOCKS, BLOCK, CopyShape
from cute_kernels.operands import SCALE_BYTES, OperandShape
from cute_kernels.primitives import tcgen05
from cute_kernels.primitives.arithmetic import paired, reciprocal, select
from cute_kernels.primitives.control import when
from cute_kernels.primitives.convert import pack, pack_e2m1, pack_e4m3, unpack, unpack_e2m1, unpack_e4m3
from cute_kernels.primitives.memory import (
    load_shared,
    load_shared_floats,
    load_words,
    store_shared,
    store_shared_byte,
    store_shared_half_if,
    store_shared_if,
)
from cute_kernels.primitives.mma import bf16_terms
from cute_kernels.replay.codes import block_factors, code_pairs, ordered, ordered_pairs, ordered_place
from cute_kernels.replay.quant import INFINITY, NAN, CopyPlaces, largest_of, scale_at
from cute_kernels.replay.window import load_row_words

THREADS = TENSOR_WARPS * WARP
CHUNK = 16  # bytes of a piece of a row
QUAD = (1, 2)  # masks of the lanes that share a vector
# A probe's factor is 2 to the exponent of its largest value less this: the scale of a block, a sixth of its largest
# value, is then at most 342 of the 448 that a scale can be, and 2**-6, below which scales lose bits, is 14 binades off.
# No factor is below 2**-118, so that its inverse is a float for the last term too.
HEADROOM, LEAST_EXPONENT, EXPONENT_BIAS = 10, 9, 127
NEXT_TERM = 4.0  # a term leaves less than a quarter of what there was, and the next has a factor so much smaller


@dataclass(frozen=True)
class Operands:
    """The operands of a CTA in shared memory, as one of its threads sees them.

    Args:
        base: shared address, a multiple of 1024.
        thread: of 128.
    """

    shape: OperandShape
    base: Int32
    thread: Int32

    @property
    def warp(self) -> Any:
        return self.thread // WARP

    @property
    def lane(self) -> Any:
        return self.thread % WARP

    @property
    def slot(self) -> Int32:
        """Shared address of the word that says where the tensor memory is."""
        return self.base + self.shape.tensor_at

    def tile_row(self, row: Any) -> tuple[Any, Any]:
        """Which row of the CTA's heads, one after the other, an operand's row holds; whether it is one, None where all
        are."""
        shape = self.shape
        of_warp = 16 * shape.warp_parts
        warp, within = row % shape.product_rows // of_warp, row % 16
        part = row // shape.product_rows * shape.warp_parts + row % of_warp // 16
        parts = shape.rows // (16 * shape.warps)
        local = warp % shape.warps * (16 * parts) + within % 8 * (2 * parts) + part * 2 + within // 8
        inside = Int32(part < parts) if shape.padded else None
        return warp // shape.warps * shape.rows + local, inside

    def _pieces(self) -> tuple[Any, Any, list[tuple[int, int, Any]]]:
        """This thread's pieces of the state: the first one's shared address and byte of the tile; of each how much
        further those are, and whether the tile has it."""
        shape, chunks = self.shape, self.shape.span // CHUNK
        row, column, slab_bytes = self.thread // chunks, self.thread % chunks * CHUNK, shape.product_rows * shape.span
        local, _ = self.tile_row(row)
        pieces = []
        # Rows of other pieces differ from the first in no bit that it has, so places add up, and a swizzle stays.
        for first in range(0, shape.products * shape.product_rows, THREADS // chunks):
            product, within = divmod(first, shape.product_rows)
            inside = self.tile_row(row + first)[1]
            for slab in range(shape.slabs):
                ahead = (product * shape.slabs + slab) * slab_bytes + within * shape.span
                pieces.append((ahead, self.tile_row(first)[0] * shape.row_bytes + slab * shape.span, inside))
        to = self.base + tcgen05.swizzled(row * shape.span + column, shape.span)
        return to, local * shape.row_bytes + column, pieces

    def copy_state(self, source: Any, policy: Any) -> None:
        """Start to copy the tiles, the first head's at a global address; clears the probes' scales."""
        to, of, pieces = self._pieces()
        for ahead, further, inside in pieces:
            tcgen05.copy_chunk(to, source + Int64(of), policy, inside, offsets=(ahead, further))
        if self.shape.scaled:
            where = self.base + self.shape.probe_scales_at + self.thread * CHUNK
            size = self.shape.scale_blocks * SCALE_BYTES
            for first in range(0, size, THREADS * CHUNK):
                store_shared_if(Int32(self.thread * CHUNK + first < size), where + first, [Uint32(0)] * 4)

    def copy_scales(self, shape: CopyShape, places: CopyPlaces, first_row: Any) -> None:
        """Start to copy the state's block scales; `first_row` of all heads is the first of the first head's tile."""
        to = self.base + self.shape.state_scales_at + self.thread % 32 * 16 + self.thread // 32 * 4
        for product in range(self.shape.products):
            local, inside = self.tile_row(self.thread + product * self.shape.product_rows)
            for block in range(self.shape.scale_blocks):
                at = places.scale + Int64(scale_at(shape, first_row + local, Int32(block * ATOM_BLOCKS)))
                skip = (product * self.shape.scale_blocks + block) * SCALE_BYTES
                tcgen05.copy_word(to + skip, at, 1 if inside is None else inside)

    def load_codes(self, source: Any, shape: CopyShape, places: CopyPlaces, first_row: Any) -> list[DecodedRow]:
        """Start to load this thread's row of each product, the first head's tile at a global address."""
        own, found = self.shape.warp_parts * 16, []
        for product in range(self.shape.products):
            row, _ = self.tile_row(product * self.shape.product_rows + self.warp * own + self.lane % own)
            codes = load_row_words(True, source + Int64(row * self.shape.read_bytes), self.shape.read_bytes // 4)
            blocks = range(0, shape.blocks, ATOM_BLOCKS)
            where = [places.scale + Int64(scale_at(shape, first_row + row, Int32(block))) for block in blocks]
            found.append(DecodedRow(codes, [load_words(at, 1)[0] for at in where]))
        return found

    def _decode(self, rows: list[DecodedRow]) -> None:
        """Store what `load_codes` loaded to tensor memory, as bfloat16."""
        (to,) = load_shared(self.slot, 1)
        to = to + self.shape.scales_at + Uint32(self.warp << 21)  # 32 lanes a warp
        for product, row in enumerate(rows):
            for i, words in enumerate(row.decoded()):
                tcgen05.store_rows(to + product * self.shape.state_columns + i * len(words), words)
        tcgen05.wait_for_stores()

    def arrive(self, rows: list[DecodedRow]) -> None:
        """Wait for what this thread has copied, split it into terms where more than one is asked for, or decode what it
        has loaded, and have the tensor cores see it, and the probes, behind the barrier that follows."""
        if self.shape.decoded:
            self._decode(rows)
        else:
            tcgen05.wait_for_copies()
        if self.shape.state_terms > 1:
            to, _, pieces = self._pieces()
            for ahead, _, _ in pieces:
                values = unpack(load_shared(to, 4, offset=ahead), "float32")
                terms = [tcgen05.tf32_terms(x, self.shape.state_terms) for x in values]
                for i in range(self.shape.state_terms):
                    words = pack([x[i] for x in terms], "float32")
                    store_shared(to, words, offset=ahead + i * self.shape.state_bytes)
        tcgen05.fence_operands()
        tcgen05.before_sync()

    # Probes.

    def _probe_at(self, row: Any, byte: Any) -> Any:
        """Where a byte of a probe's row lies; pieces of up to 16 bytes stay together."""
        shape = self.shape
        at = tcgen05.swizzled(row * shape.span + byte % shape.span, shape.span)
        return self.base + shape.probes_at + byte // shape.span * (shape.probes * shape.span) + at

    def store(self, vector: int, channel: Any, inside: Any, pair: list[Any], apart: int, terms: int) -> None:
        """One channel of two drawn probes, `apart` vectors from each other, as `StagedVectors.store`."""
        shape = self.shape
        rows = [(e, vector + e * apart) for e in (0, 1)]
        if shape.scaled:
            for e, row in rows:
                where = self.base + shape.floats_at + (row * shape.d_state + channel) * 4
                store_shared_if(inside, where, [pair[e].bitcast(Uint32)])
            return
        if shape.kind == "tf32":
            for e, row in rows:
                for i, x in enumerate(tcgen05.tf32_terms(pair[e], shape.probe_terms)):
                    where = self._probe_at(Int32(i * shape.blocks * 8 + row), channel * 4)
                    store_shared_if(inside, where, [x.bitcast(Uint32)])
            return
        for i, word in enumerate(bf16_terms(pair[0], pair[1], shape.probe_terms)):
            for e, row in rows:
                place = ordered_place(channel, shape.read_bits)
                where = self._probe_at(Int32(i * shape.blocks * 8 + row), place * 2)
                store_shared_half_if(inside, where, word >> (16 * e))

    def stage_probes(self, loaded: list[list[list[Any]]], dtype: str) -> None:
        """Write the probes, by probe and block what `load_block` loaded, and of drawn ones the codes.

        Of what all warps have loaded each writes a part.
        """
        shape = self.shape
        if shape.drawn and not shape.scaled:
            return
        blocks, vector = [words for probe in loaded for words in probe], shape.vector
        chunks = shape.d_state // (4 * vector)
        pieces = 1 if shape.scaled else vector * shape.row_bytes // (shape.d_state * CHUNK)

        def encode(unit: int) -> None:
            block, part = unit % shape.blocks, unit // shape.blocks
            values = self._drawn(block, vector, chunks) if shape.drawn else unpack(blocks[block], dtype)
            self._store_codes(block, part, vector, values)

        def write(unit: int) -> None:
            chunk, piece = divmod(unit, pieces)
            byte = ((chunk * 4 + self.lane % 4) * pieces + piece) * CHUNK
            for block, words in enumerate(blocks):
                size = len(words) // (chunks * pieces)
                self._store_piece(block, byte, words[unit * size : (unit + 1) * size], dtype)

        units = shape.blocks * shape.d_state // (4 * BLOCK["nvfp4"]) if shape.scaled else chunks * pieces
        for i in range(units):  # the last warps begin: the first allocates and starts products
            warp = TENSOR_WARPS - 1 - i % TENSOR_WARPS
            when(self.warp == warp, lambda i=i: (encode if shape.scaled else write)(i))

    def _store_piece(self, block: int, byte: Any, words: list[Any], dtype: str) -> None:
        """16 bytes of each term of this lane's probe of a block, in the order of the state's elements."""
        shape = self.shape
        if shape.kind == "f16" and dtype == shape.dtype:
            terms = [ordered_pairs(words, shape.read_bits)]
        elif shape.kind == "tf32" and dtype != "float32":  # 16 bits are a TF32 as they are
            terms = [pack(unpack(words, dtype), "float32")]
        else:
            terms = self._term_words(ordered(unpack(words, dtype), shape.read_bits))
        for i, of_term in enumerate(terms):
            row = i * shape.blocks * 8 + block * 8 + self.lane // 4
            store_shared(self._probe_at(row, byte), of_term)

    def _term_words(self, values: list[Any]) -> list[list[Any]]:
        """The words of each term of some floats."""
        count = self.shape.probe_terms
        if self.shape.kind == "tf32":
            made = [tcgen05.tf32_terms(x, count) for x in values]
            return [pack([x[i] for x in made], "float32") for i in range(count)]
        pairs = [bf16_terms(values[i], values[i + 1], count) for i in range(0, len(values), 2)]
        return [[pair[i] for pair in pairs] for i in range(count)]

    def _drawn(self, block: int, vector: int, chunks: int) -> list[Float32]:
        """This lane's floats of a drawn probe of a block, as `load_block` would have loaded them."""
        row = block * 8 + self.lane // 4
        where = self.base + self.shape.floats_at + (row * self.shape.d_state + self.lane % 4 * vector) * 4
        places = [(c * 4 * vector + first) * 4 for c in range(chunks) for first in range(0, vector, 4)]
        return [x for skip in places for x in load_shared_floats(where, 4, 16, offset=skip)]

    def _store_codes(self, block: int, part: int, vector: int, values: list[Any]) -> None:
        """Codes and scales of each term of 16 of `values`, those of this lane's probe of a block, and its factor."""
        shape, row, size = self.shape, block * 8 + self.lane // 4, BLOCK["nvfp4"]
        largest = largest_of(values, QUAD)
        word = largest.bitcast(Uint32)
        exponent, least = Int32(word >> 23), Int32(LEAST_EXPONENT + HEADROOM)
        exponent = select(exponent < least, least, exponent) - HEADROOM
        unit, inverse = ((x << 23).bitcast(Float32) for x in (exponent, 2 * EXPONENT_BIAS - exponent))
        factor = select(word >= Uint32(INFINITY), Uint32(NAN), unit.bitcast(Uint32))
        if part == 0:
            store_shared_if(Int32(self.lane % 4 == 0), self.base + shape.factors_at + row * 4, [factor])
        chunk, within = divmod(part * size, vector)
        element = (chunk * 4 + self.lane % 4) * vector + within
        number, rest = element // size, values[part * size : (part + 1) * size]
        for term in range(shape.probe_terms):
            at = term * shape.blocks * 8 + row
            ratio = NEXT_TERM**term
            codes, scale, step = encode_block(rest, inverse * Float32(ratio))
            store_shared(self._probe_at(at, element // 2), codes)
            to = number // ATOM_BLOCKS * SCALE_BYTES + at % 32 * 16 + at // 32 * 4 + number % ATOM_BLOCKS
            store_shared_byte(self.base + shape.probe_scales_at + to, scale)
            if term + 1 < shape.probe_terms:
                decoded = [x for word in codes for x in unpack_e2m1(word)]
                step = step * (unit * Float32(-1.0 / ratio))
                rest = paired("fma.rn.f32x2", decoded, [step] * size, rest)

    # Products.

    def start_products(self, barrier: Any) -> None:
        """Start all products, by thread 0 behind a barrier, and have `barrier` say when they are over."""
        tcgen05.after_sync()
        when(self.thread == 0, lambda: self._issue(barrier))

    def _issue(self, barrier: Any) -> None:
        shape, right_at = self.shape, self.shape.probes_at
        (to,) = load_shared(self.slot, 1)
        scales = [to + shape.scales_at + i * shape.scale_columns for i in range(shape.products + 1)]
        for i in range((shape.products + 1) * shape.scale_blocks):
            matrix = tcgen05.scale_matrix(self.base + shape.state_scales_at + i * SCALE_BYTES)
            tcgen05.copy_scales(to + shape.scales_at + 4 * i, matrix)
        state, right = (tcgen05.matrix(self.base + at, shape.span) for at in (0, right_at))
        for product in range(shape.products):
            of_product = (scales[product], scales[-1]) if shape.scaled else ()
            into = to + product * shape.probes
            for term in range(shape.state_terms):
                left = term * shape.state_bytes + product * shape.product_rows * shape.row_bytes
                of_term = tcgen05.step_further(state, left)
                if shape.decoded:
                    of_term = to + shape.scales_at + product * shape.state_columns
                self._multiply(into, of_term, right, of_product, adds=term > 0)
        tcgen05.commit(barrier)

    def _multiply(self, to: Any, state: Any, probes: Any, scales: tuple[Any, ...], *, adds: bool) -> None:
        """One product along all of K; the state as `tcgen05.multiply` takes it."""
        shape = self.shape
        descriptor = tcgen05.instruction(shape.dtype, shape.product_rows, shape.probes)
        for step, first in enumerate(range(0, shape.row_bytes, tcgen05.STEP_BYTES)):
            slab, within = divmod(first, shape.span)
            ahead = slab * shape.product_rows * shape.span + within
            tcgen05.multiply(
                shape.kind,
                to,
                state + first // 4 if shape.decoded else tcgen05.step_further(state, ahead),
                tcgen05.step_further(probes, slab * shape.probes * shape.span + within),
                descriptor,
                adds=adds or step > 0,
                scales=[columns + 4 * step for columns in scales],
            )

    def sums(self, parts: int, factors: list[list[Any]], tile_scale: Any | None) -> list[list[list[Float32]]]:
        """The products as `draft.StateRows` returns them, for each 16 rows of this warp, once they are over, times
        `factors` of each block's two columns.

        Args:
            tile_scale: of this thread's rows of a state whose codes have any.
        """
        tcgen05.after_sync()
        shape, (to,) = self.shape, load_shared(self.slot, 1)
        if tile_scale is not None:
            factors = [[x * tile_scale for x in of_block] for of_block in factors]
        if shape.scaled:
            at = self.base + shape.factors_at + self.lane % 4 * 8
            own = [load_shared_floats(at, 2, 8, offset=b * 32) for b in range(shape.blocks)]
            factors = [[x * y for x, y in zip(*pair, strict=True)] for pair in zip(factors, own, strict=True)]
        found = []
        for part in range(parts):
            lane = self.warp * 32 + part % shape.warp_parts * 16
            first = to + Uint32(lane << 16) + part // shape.warp_parts * shape.probes
            columns = tcgen05.load_sums(first, list(range(0, shape.probes, 8)))
            found.append([self._total(columns, b, factors[b]) for b in range(shape.blocks)])
        tcgen05.before_sync()
        return found

    def _total(self, columns: list[list[Any]], block: int, factors: list[Any]) -> list[Float32]:
        """The sums of a block of probes over their terms, times factors of its two columns."""
        shape, (*terms, total) = self.shape, columns[block :: self.shape.blocks]
        share = Float32(1.0 / NEXT_TERM if shape.scaled else 1.0)
        for term in reversed(terms):
            total = [x + y * share for x, y in zip(term, total, strict=True)]
        return [x * factors[i % 2] for i, x in enumerate(total)]


@dataclass(frozen=True)
class DecodedRow:
    """A row of a copy that a thread decodes.

    Args:
        codes: words of 8 codes.
        scales: words of four block scales.
    """

    codes: list[Uint32]
    scales: list[Uint32]

    def decoded(self) -> list[list[Uint32]]:
        """Pairs of bfloat16 in the order of `codes.ordered`, for each word of scales; times 2**-62."""
        found, of_block = [], BLOCK["nvfp4"] // 8
        for i, word in enumerate(self.scales):
            codes = self.codes[i * ATOM_BLOCKS * of_block : (i + 1) * ATOM_BLOCKS * of_block]
            factors = block_factors(word, ATOM_BLOCKS)
            found.append([x for j, code in enumerate(codes) for x in code_pairs("nvfp4", code, factors[j // of_block])])
        return found


def encode_block(values: list[Any], factor: Any) -> tuple[list[Any], Any, Float32]:
    """NVFP4 codes of 16 values times a power of two: two words, the scale in the low byte of a word, and as a float."""
    share = largest_of(values) * (factor * Float32(1.0 / 6.0))
    (scale,) = pack_e4m3([share, *[Float32(0.0)] * 3])
    step = unpack(unpack_e4m3(scale), "float16")[0]
    inverse = select(step == Float32(0.0), Float32(0.0), reciprocal(step)) * factor
    return pack_e2m1(paired("mul.rn.f32x2", values, [inverse] * len(values))), scale, step
