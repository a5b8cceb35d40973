"""What a step kernel is specialised for: frozen values that need no compiler, for plans, tests and the tuner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

SIZE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CODE_BITS = {"nvfp4": 4, "mxfp8": 8, "float8_e4m3fn": 8, "int8": 8, "bfloat16": 16, "float16": 16}
WARP, LANES_PER_RECORD = 32, 8
THREADS = 128  # of a CTA of the kernels that have no configuration
ROW_BLOCK = 16  # rows of a product of several tokens
TENSOR_WARPS = 4  # of a CTA whose readout is that of tcgen05: each reaches a quarter of tensor memory
RingLayout = Literal["record_major", "head_major", "strided"]
Precision = Literal["fp32", "tf32", "bf16"]
Readout = Literal["mma", "tcgen05", "tcgen05_f16"]
TERMS: dict[Precision, int] = {"fp32": 3, "tf32": 2, "bf16": 1}
UNCUT = 1 + 2.0**-10 / 3  # times a float that TF32 then cuts to 11 bits: what that takes on average


@dataclass(frozen=True)
class StepConfig:
    """Launch parameters of a step.

    Args:
        split: CTAs that share the V rows of one head.
        warps: of a CTA: 4 or 8, and for several tokens, or where a copy is read, also 1 or 2. With tcgen05
            those of a head, 1, 2 or 4: a CTA then has 4.
        ctas: CTAs that the registers of a multiprocessor must have room for; 1 leaves it to the compiler.
        fold_values: state values that a thread of a fold keeps in registers at a time.
        heads: of one key head that a CTA works on, each with `warps` of its own, where a copy is read: they score the
            records together. With tcgen05 `warps` decides.
        precision: of the products of several tokens, on tensor cores: a float32 factor becomes the sum of 3 bfloat16
            terms ("fp32", all of its 24 bits), of 2 ("tf32", 16 bits) or 1 ("bf16", 8 bits). With several tokens of
            bfloat16 "tf32" means TF32 for a float32 state, and for keys where channels decay by themselves: 11 bits,
            where outputs have 8 (`DraftShape.tf32`). Sums are float32, and a 16-bit factor is never rounded. One
            token's, without a copy, are float32.
        readout: what multiplies the state by several tokens' probes: "mma", registers of all warps; "tcgen05",
            tensor memory (`operands.OperandShape` says what precision means there); "tcgen05_f16" likewise, with NVFP4
            codes made bfloat16 on their way there instead of multiplied as they are.
    """

    split: int = 1
    warps: int = 4
    ctas: int = 1
    fold_values: int = 32
    heads: int = 1
    precision: Precision = "fp32"
    readout: Readout = "mma"


@dataclass(frozen=True)
class Mamba2Options:
    """What a Mamba-2 step is given; None stands for an absent tensor, a name for its dtype."""

    dt_dtype: str = "bfloat16"
    D_dtype: str | None = None
    has_z: bool = False
    dt_bias_dtype: str | None = None
    dt_softplus: bool = False


@dataclass(frozen=True)
class GdnOptions:
    """What a Gated DeltaNet step is given: dtypes, the factor of q, and how the engine computes norm and beta.

    Args:
        scale: factor of q.
        l2norm_eps: epsilon under the root of the l2 norm of q and k; None when they come normalised.
        round_beta: beta is rounded to the dtype of b.
    """

    scale: float
    a_dtype: str = "bfloat16"
    b_dtype: str = "bfloat16"
    l2norm_eps: float | None = 1e-6
    round_beta: bool = False


@dataclass(frozen=True)
class KdaOptions:
    """What a Kimi Delta Attention step is given.

    Args:
        scale, l2norm_eps: as for `GdnOptions`.
        lower_bound: of the log-decay, a negative number; None for the unbounded gate.
    """

    scale: float
    g_dtype: str = "bfloat16"
    beta_dtype: str = "bfloat16"
    lower_bound: float | None = None
    l2norm_eps: float | None = 1e-6


Options = Mamba2Options | GdnOptions | KdaOptions


@dataclass(frozen=True)
class RowOptions:
    """How a step is called: dtype of `cache_indices`, which masks come, and dependent launch (PDL)."""

    index_dtype: str = "int32"
    has_force_fold: bool = False
    pdl: bool = False
    has_cu_seqlens: bool = False


@dataclass(frozen=True)
class StepKey:
    """Everything that one compiled step kernel depends on, beside the architecture.

    `ring_layout` is "record_major" or "head_major" where a slot's axes are packed in that order, else "strided";
    `value_dtype`, the activations' when None, and `decay_dtype` are those of the rings, `read_dtype` that of the copy
    that is read, or None; `rounding` is "nearest" or "stochastic". With `cu_seqlens` rows may have fewer tokens.
    """

    num_v_heads: int
    num_k_heads: int
    head_dim: int
    d_state: int
    window: int
    ring_capacity: int
    ring_layout: RingLayout
    checkpoint_dtype: str
    activation_dtype: str
    options: Options
    config: StepConfig
    rows: RowOptions = RowOptions()
    value_dtype: str | None = None
    decay_dtype: str = "float32"
    num_tokens: int = 1
    read_dtype: str | None = None
    rounding: str = "nearest"

    @property
    def drafts(self) -> bool:
        """Whether the kernel of several tokens runs, rather than that of one, which reads no copies."""
        return self.num_tokens > 1 or self.rows.has_cu_seqlens or self.read_dtype is not None

    @property
    def state_dtype(self) -> str:
        """Of the state that steps read, a copy's or the checkpoint's."""
        return self.read_dtype or self.checkpoint_dtype

    @property
    def tensor(self) -> bool:
        """Whether tcgen05 multiplies the state by probes."""
        return self.config.readout != "mma"

    @property
    def direct(self) -> bool:
        """Whether lanes load the state from where it lies, and not from a copy in shared memory.

        So they do where channels decay and there are several tokens: with tiles of 64 KiB beside what such a step
        stages a multiprocessor has room for two CTAs, without them for four (GLM-5.3-Flash, batch 256, 4 and 8 tokens:
        392 -> 339 us and 449 -> 410; H200, 2026-11-30).
        """
        return isinstance(self.options, KdaOptions) and self.drafts and self.read_dtype is None and not self.tensor

    @property
    def heads_together(self) -> int:
        """Heads of one key group that a CTA works on, each with warps of its own."""
        return TENSOR_WARPS // self.config.warps if self.tensor else self.config.heads

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.heads_together * self.config.warps * WARP

    @property
    def row_ctas(self) -> int:
        """CTAs that a launch has for each row of the batch."""
        return self.num_v_heads * self.config.split // self.heads_together

    @property
    def record_dtype(self) -> str:
        """The dtype of the value ring."""
        return self.value_dtype or self.activation_dtype

    @property
    def probes(self) -> int:
        """Vectors that each state row is multiplied by: the query, and the key where a record needs the state."""
        return 1 if isinstance(self.options, Mamba2Options) else 2


def read_vector(bits: int, d_state: int) -> int:
    """Elements of a row that each of 4 lanes takes at once, `bits` each: 16 bytes, or of float32 as many as of a key of
    16 bits (Qwen3.5-122B, batch 256, 4 tokens: 284 -> 279 us; H200, 2026-11-30), or all that there are."""
    return min(max(128 // bits, 8), d_state // 4)


@dataclass(frozen=True)
class Tile:
    """The work of one CTA and how its threads share it, derived from a key.

    A tile is `rows` consecutive V rows of one head, all K columns. The readout gives each row to 8 lanes; the fold
    gives `fold_lanes` lanes to a row, so that a warp writes whole rows.
    """

    rows: int
    warps: int
    d_state: int
    state_size: int
    activation_size: int
    window: int
    fold_values: int
    value_size: int
    read_bits: int
    probes: int = 1
    channels: bool = False
    tokens: int = 1

    @classmethod
    def of(cls, key: StepKey) -> Tile:
        return cls(
            rows=key.head_dim // key.config.split,
            warps=key.config.warps,
            d_state=key.d_state,
            state_size=SIZE_BYTES[key.checkpoint_dtype],
            activation_size=SIZE_BYTES[key.activation_dtype],
            window=key.window,
            fold_values=key.config.fold_values,
            value_size=SIZE_BYTES[key.record_dtype],
            read_bits=CODE_BITS[key.read_dtype] if key.read_dtype else 8 * SIZE_BYTES[key.checkpoint_dtype],
            probes=0 if key.drafts or key.num_tokens == 0 else key.probes,
            channels=isinstance(key.options, KdaOptions),
            tokens=key.num_tokens,
        )

    @property
    def bytes(self) -> int:
        return self.rows * self.d_state * self.read_bits // 8

    @property
    def read_vector(self) -> int:
        return read_vector(self.read_bits, self.d_state)

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def readout_rows(self) -> int:
        """Rows that the readout of a CTA covers at once."""
        return self.threads // LANES_PER_RECORD

    @property
    def vector(self) -> int:
        """Elements of a 16-byte access to the checkpoint."""
        return 16 // self.state_size

    @property
    def records_per_pass(self) -> int:
        return self.threads // LANES_PER_RECORD

    @property
    def key_chunks(self) -> int:
        """Vectors of a key, and of a state row, that each of 8 lanes takes."""
        return self.d_state // self.vector // LANES_PER_RECORD

    @property
    def value_vector(self) -> int:
        """Value elements of a 16-byte access."""
        return 16 // self.value_size

    @property
    def value_vectors(self) -> int:
        """16-byte accesses that a record's values for this tile take."""
        return self.rows // self.value_vector

    @property
    def fold_lanes(self) -> int:
        """Lanes that share a row of a fold, whose 16-byte accesses lie together."""
        return 4

    @property
    def fold_chunks(self) -> int:
        """Vectors of a row that each of the fold's lanes takes."""
        return self.d_state // self.vector // self.fold_lanes

    @property
    def fold_span(self) -> int:
        """Of these, how many at a time, of two rows: a power of two. Beside a copy the state waits in registers too, so
        that 64 values would spill (Super, NVFP4, batch 256: folds of 788 and 851 us; H200, 2026-11-30)."""
        values = self.fold_values if self.read_bits == 8 * self.state_size else min(self.fold_values, 32)
        most = max(1, values // (2 * self.vector))
        return min(self.fold_chunks, 1 << (most.bit_length() - 1))

    @property
    def padded_window(self) -> int:
        """The window in whole 16s, which all that is staged of it has."""
        return -(-self.window // 16) * 16

    @property
    def key_size(self) -> int:
        """Bytes of an element of a staged key, which is scaled where channels decay by themselves."""
        return 4 if self.channels else self.activation_size

    @property
    def key_stride(self) -> int:
        """Bytes between staged keys: 8 of them lie in all banks, with a record's weight between them, but for scaled
        ones, which replace decays."""
        return self.d_state * self.key_size + (0 if self.channels else 16)

    @property
    def value_stride(self) -> int:
        """Bytes between the staged values of two records."""
        return self.staged_values * self.value_size

    @property
    def value_turns(self) -> int:
        """Of 8 rows of neighbouring records, how many lie in other banks: group i of record j is at i ^ (j % this)."""
        return 4 if self.staged_values % 32 == 0 else 2

    @property
    def channel_bytes(self) -> int:
        """Shared memory of the decays by channel (`replay.channels`), in which a fold also stages the scaled keys."""
        return (self.padded_window + 1 + self.tokens) * self.d_state * 4 if self.channels else 0

    @property
    def window_row(self) -> int:
        """Of the decays by channel, that of the whole window: behind that of one token, which a fold needs longer."""
        return self.padded_window + (1 if self.probes > 0 else 0)

    @property
    def staged_vector_bytes(self) -> int:
        """From one staged probe of bfloat16 to the next: the accesses of neighbouring rows lie in other banks."""
        return self.d_state * 2 + 8 * self.read_vector

    @property
    def staged_tf32_bytes(self) -> int:
        """The same of TF32."""
        return self.d_state * 4 + 16

    @property
    def products_in_rows(self) -> bool:
        """Whether the products of a fold lie in the folded rows themselves.

        That saves the shared memory which lets a multiprocessor hold one CTA more with two probes; with one probe a
        fold is 0.5 % slower for it (H200, 2026-11-29).
        """
        return self.probes > 1

    @property
    def whole_passes(self) -> bool:
        """Whether passes over the padded window end with it, so that no thread has a record behind it."""
        return self.padded_window % self.records_per_pass == 0

    @property
    def value_parts(self) -> int:
        """Parts of the rows whose values a fold stages one after the other.

        Where channels decay by themselves one token's fold then keeps them in the place of decays that it has read,
        and a multiprocessor holds three tiles of 64 KiB (GLM-5.3-Flash with decays in bfloat16, batch 256: 293 -> 275
        us; H200, 2026-11-30).
        """
        parts, rest = divmod(self.value_vectors, LANES_PER_RECORD)
        one_pass = self.probes > 0 and self.padded_window == self.records_per_pass
        large = self.state_size == 4 and self.d_state <= 128  # a thread keeps the decays of the columns that it folds
        return parts if self.channels and one_pass and large and parts > 1 and rest == 0 else 1

    @property
    def values_at(self) -> int:
        """Where a fold's staged values begin."""
        if self.value_parts > 1:
            return (self.padded_window + 1) * self.d_state * 4  # what one token decays by stays
        return self.channel_bytes if self.channels else self.padded_window * self.key_stride

    @property
    def staged_values(self) -> int:
        """Values of a record that are staged at a time."""
        return self.rows // self.value_parts

    @property
    def partials_over_decays(self) -> bool:
        """Whether a warp's partial sums take the place of decays by channel, of the records that it alone has scored.

        It saves memory as `value_parts` does.
        """
        own = WARP // LANES_PER_RECORD * self.d_state
        return self.channels and self.whole_passes and self.probes * self.rows <= own

    def partials_at(self, probe: int, warp: Any) -> Any:
        """Where in the staging memory a warp keeps its partial sums of a probe, float [rows]."""
        if self.partials_over_decays:
            return warp * (WARP // LANES_PER_RECORD * self.d_state * 4) + probe * self.rows * 4
        return warp * (self.rows * 4) + (self.channel_bytes + probe * self.warps * self.rows * 4)

    @property
    def staging_bytes(self) -> int:
        """Shared memory beside the tile: the fold's records, or the readout's partial sums there."""
        products = self.rows * 4 if self.probes == 1 else 0
        fold = self.values_at + self.padded_window * self.value_stride + products
        partials = 0 if self.partials_over_decays else self.warps * self.probes * self.rows * 4
        return max(fold, self.channel_bytes + partials)

    @property
    def smem_bytes(self) -> int:
        return self.bytes + self.staging_bytes + 16
