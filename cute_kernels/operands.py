"""What a step's products of state and probes take where tcgen05 computes them: sizes, derived from a key.

The state is one operand, of 64 or 128 rows; the probes are the other, each of their terms a column of its own. Both lie
in shared memory as the tensor cores read it, the sums in tensor memory. Products are exact and sums float32. With
"tcgen05_f16" codes of nvfp4 times their block scales, which a bfloat16 holds exactly, lie in tensor memory.

| state | kind | terms of the state | terms of a probe |
|---|---|---|---|
| bfloat16 | f16 | itself | bfloat16: 1, or 2 of float16, or 1, 2, 3 of float32 |
| float16 | f16 | itself | itself, float16 |
| float32 | tf32 | 1, or 2 for "fp32" | TF32: 1, or 3 of float32 for "fp32" |
| nvfp4 | mxf4nvf4 | itself, with its scales | NVFP4: 2, 3, 4 |
| nvfp4, "tcgen05_f16" | f16 | bfloat16 | as of bfloat16 |

With three counts the precision chooses: "bf16", "tf32", "fp32"; where activations are float16, "tf32" chooses as "fp32"
does, but for bfloat16 terms. So a float32 state errs, relative to itself, at most `STATE_ERROR`; a probe errs relative
to itself at most 2**-8, 2**-16, 2**-24 as bfloat16 terms and 2**-11 or 2**-33 as TF32 terms, and relative to the
largest of its 16 neighbours at most `NVFP4_ERROR` as NVFP4 terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cute_kernels.configs import TENSOR_WARPS, TERMS, KdaOptions, Precision, StepKey, Tile, read_vector
from cute_kernels.draft_shape import DraftShape

Kind = Literal["f16", "tf32", "mxf4nvf4"]
KINDS: dict[str, Kind] = {"bfloat16": "f16", "float16": "f16", "float32": "tf32", "nvfp4": "mxf4nvf4"}
NVFP4_TERMS: dict[Precision, int] = {"bf16": 2, "tf32": 3, "fp32": 4}
# Tensor cores read 11 bits of a float32; two terms are each rounded to so many.
STATE_ERROR: dict[Precision, float] = {"bf16": 2.0**-10, "tf32": 2.0**-10, "fp32": 2.0**-22}
# A term leaves at most a sixth of what there was, and a 16th of that where its scale was rounded down.
NVFP4_ERROR: dict[Precision, float] = {name: (17 / 96) ** terms for name, terms in NVFP4_TERMS.items()}
ROWS, MOST_ROWS = (64, 128), 128  # of a tile; of one product
SCALE_BLOCK, SCALE_BYTES = 64, 512  # elements of K whose scales lie together, 128 rows; their bytes
MOST_SPAN, LEAST_COLUMNS = 128, 32


@dataclass(frozen=True)
class OperandShape:
    """Sizes of the operands of a CTA.

    An operand lies in slabs along K, [slab][row][`span` bytes], within which the 16-byte chunks of a row are exchanged
    by its number (`replay.tensor`).

    The state's rows are those of all heads that the CTA works on, in parts of 16 of which each warp takes `warp_parts`,
    all within its quarter of tensor memory: 16 or 32 lanes of the sums of each product.

    Args:
        dtype: of the state as an operand.
        heads, rows, warps: heads of the CTA; rows (64 or 128) and warps of each.
        read_bits: of an element of the state in memory.
        decoded: whether threads make bfloat16 of the codes, in tensor memory.
        blocks: of 8 probes.
        state_terms, probe_terms: how many each factor is the sum of.
        drawn: whether probes are made channel by channel, not taken as they came.
        fold_bytes: what a fold stages of one head where the operands were; 0 where what it needs lies elsewhere.
    """

    dtype: str
    heads: int
    rows: int
    warps: int
    d_state: int
    read_bits: int
    decoded: bool
    blocks: int
    state_terms: int
    probe_terms: int
    drawn: bool
    fold_bytes: int

    @classmethod
    def of(cls, key: StepKey) -> OperandShape:
        tile, precision, activation = Tile.of(key), key.config.precision, key.activation_dtype
        decoded, drawn = key.config.readout == "tcgen05_f16", isinstance(key.options, KdaOptions)
        dtype = "bfloat16" if decoded else key.state_dtype
        floats = drawn or activation == "float32"
        # The 11 bits of float16 are more than TF32's rounding leaves of a sum.
        asked: Precision = "fp32" if activation == "float16" and precision == "tf32" else precision
        terms, states = 1, 1
        if dtype == "nvfp4":
            terms = NVFP4_TERMS[asked]
        elif dtype == "float32":
            terms, states = (3 if floats and asked == "fp32" else 1), (2 if asked == "fp32" else 1)
        elif drawn or (dtype == "bfloat16" and activation != "bfloat16"):
            terms = TERMS[precision] if floats else 2
        blocks = DraftShape.of(key).probe_blocks
        sizes = (key.heads_together, tile.rows, tile.warps, key.d_state, tile.read_bits)
        return cls(dtype, *sizes, decoded, blocks, states, terms, drawn, 0 if drawn else tile.staging_bytes)

    @property
    def kind(self) -> Kind:
        return KINDS[self.dtype]

    @property
    def scaled(self) -> bool:
        """Whether both operands have block scales."""
        return self.kind == "mxf4nvf4"

    @property
    def product_rows(self) -> int:
        """Rows of one product; with block scales always 128, of which half are zeros where a CTA has 64."""
        return MOST_ROWS if self.scaled else min(MOST_ROWS, self.heads * self.rows)

    @property
    def products(self) -> int:
        return -(-self.heads * self.rows // self.product_rows)

    @property
    def warp_parts(self) -> int:
        """Parts of 16 rows of one product that a warp takes."""
        return self.product_rows // (16 * TENSOR_WARPS)

    @property
    def padded(self) -> bool:
        """Whether some rows of the operand are none of the tile."""
        return self.heads * self.rows < self.products * self.product_rows

    @property
    def probes(self) -> int:
        """Columns: 8 of each block of each term."""
        return self.probe_terms * self.blocks * 8

    @property
    def read_bytes(self) -> int:
        """Of a row of the state in memory."""
        return self.d_state * self.read_bits // 8

    @property
    def row_bytes(self) -> int:
        """Of a row of an operand."""
        return self.d_state * 2 if self.decoded else self.read_bytes

    @property
    def vector(self) -> int:
        """Elements of a probe that a lane has loaded of each chunk, as `Tile.read_vector`."""
        return read_vector(self.read_bits, self.d_state)

    @property
    def span(self) -> int:
        """Bytes of a row that lie together."""
        return min(MOST_SPAN, self.row_bytes)

    @property
    def slabs(self) -> int:
        return self.row_bytes // self.span

    @property
    def state_bytes(self) -> int:
        """Shared memory of one term."""
        return 0 if self.decoded else self.products * self.product_rows * self.row_bytes

    @property
    def probes_at(self) -> int:
        return self.state_terms * self.state_bytes

    @property
    def scale_blocks(self) -> int:
        return self.d_state // SCALE_BLOCK if self.scaled else 0

    @property
    def state_scales_at(self) -> int:
        return -(-(self.probes_at + self.probes * self.row_bytes) // 16) * 16

    @property
    def probe_scales_at(self) -> int:
        return self.state_scales_at + self.products * self.scale_blocks * SCALE_BYTES

    @property
    def factors_at(self) -> int:
        """Where the float32 factors of probes with block scales lie."""
        return self.probe_scales_at + self.scale_blocks * SCALE_BYTES

    @property
    def floats_at(self) -> int:
        """Where drawn probes lie as floats [probe][K] before they become codes."""
        return self.factors_at + (self.blocks * 8 * 4 if self.scaled else 0)

    @property
    def tensor_at(self) -> int:
        """Where the address of the tensor memory lies."""
        floats = self.blocks * 8 * self.d_state * 4 if self.scaled and self.drawn else 0
        return self.floats_at + floats

    @property
    def bytes(self) -> int:
        """Shared memory of all of it, or of the records of a fold that follow it."""
        return max(self.tensor_at + 16, self.heads * self.fold_bytes)

    @property
    def scale_columns(self) -> int:
        """Columns of tensor memory for the block scales of one product's state, or of the probes."""
        return 4 * self.scale_blocks

    @property
    def scales_at(self) -> int:
        """The first of these columns, behind all sums: of each product's state, then of the probes."""
        return self.products * self.probes

    @property
    def state_columns(self) -> int:
        """Columns of tensor memory for the state of one product, which come behind all sums."""
        return self.row_bytes // 4 if self.decoded else 0

    @property
    def columns(self) -> int:
        """Columns of tensor memory: a power of two."""
        needed = self.scales_at + (self.products + 1) * self.scale_columns + self.products * self.state_columns
        return max(LEAST_COLUMNS, 1 << (needed - 1).bit_length())


def unfit_reason(key: StepKey, tensor_columns: int) -> str | None:
    """Why tcgen05 cannot compute the readout of this key, or None: the one statement of what it serves."""
    dtype, rows = key.state_dtype, Tile.of(key).rows
    if not tensor_columns:
        return "readout: this architecture has no tcgen05; use mma"
    if not key.drafts or not key.num_tokens:
        return "readout: tcgen05 serves steps of several tokens or of read copies, got one token or a fold; use mma"
    if key.config.readout == "tcgen05_f16" and dtype != "nvfp4":
        return f"readout: tcgen05_f16 reads nvfp4, got {dtype}; use tcgen05"
    if dtype not in KINDS:
        return f"readout: tcgen05 reads {', '.join(KINDS)}, got {dtype}; use mma"
    exact = key.activation_dtype == "float16" and not isinstance(key.options, KdaOptions)
    if dtype == "float16" and not exact:
        return "readout: tcgen05 multiplies float16 by float16 as it came, which these probes are not; use mma"
    if rows not in ROWS:
        return f"readout: tcgen05 takes {' or '.join(map(str, ROWS))} rows of a head a CTA, got {rows}; change split"
    if TENSOR_WARPS % key.config.warps:
        return f"readout: tcgen05 takes 1, 2 or {TENSOR_WARPS} warps a head, got {key.config.warps}"
    heads, group = key.heads_together, key.num_v_heads // key.num_k_heads
    if heads > 1 and (key.config.split > 1 or group % heads or isinstance(key.options, KdaOptions)):
        return (
            f"warps: {heads} heads of {key.config.warps} warps share probes with split 1 in groups of a multiple of "
            f"{heads}, got split {key.config.split} and groups of {group}; raise warps"
        )
    if (columns := OperandShape.of(key).columns) > tensor_columns:
        return f"readout: {columns} columns of tensor memory, there are {tensor_columns}; raise warps or use mma"
    return None
