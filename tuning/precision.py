"""How far each precision of the state takes the outputs from float64, over thousands of teacher-forced tokens.

One sequence of random tokens runs through the float64 recurrence and, in steps of `STEP` tokens that are all accepted,
through the torch twin of each scheme, in float32 arithmetic. Records are float32 where a scheme does not say otherwise,
so that what differs is how the state is stored. An error is |y - exact| / |exact| over the channels of one head at one
token; the output is S q alone, without skip or gate. Errors are those of the `SAMPLE` tokens before each length, in
steps that do not fold (a step that folds reads a state that is not rounded yet). The state's error is that of the
checkpoint with its records folded, before it is rounded, against the float64 state, over all heads.

Schemes of smaller records round what a step has just appended to a ring, once: each record of each head (or group) has
scales of its own, one in float32 for FP8 and int8; NVFP4 has one a record too, above its block scales. "Values" are x
of Mamba-2 and u of the delta rules; Kimi Delta Attention alone has decays that are worth it. What they save is counted
(`tuning.roofline`) against records in bfloat16 with decays in float32, in steps of one token with `LIVE` live records
of `FLAGSHIPS`, that read an NVFP4 copy and do not fold.

Inputs: q, k, v (C, B, x) are silu of normal numbers, as the convolution before the layer leaves them, rounded to
bfloat16; gates are normal numbers. The regimes of the decays:

* init: parameters as the initialisation in Hugging Face's modeling code: Mamba-2 A in [1, 16], dt in [0.001, 0.1];
  Gated DeltaNet A in (0, 16], dt_bias 1 (modeling_qwen3_next), which forgets within a token or two; Kimi Delta
  Attention A in [1, 16], dt_bias from dt in [0.001, 0.1] a channel (modeling_kimi_linear).
* long: heads, or channels of a head, that remember 16 to 8192 tokens, as trained models have them beside short ones.
* near-one: adversarial, a decay of about exp(-1e-6) a token: nothing is forgotten.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm import GdnInputs, KdaInputs, LayerSpec, Mamba2Inputs, Pool, ReplaySpec, make_cursors, make_pool
from replayssm.inputs import Inputs
from replayssm.pool import record_shapes
from replayssm.reference import formats, philox, quant, recurrence, replay, storage
from replayssm.spec import READ_FORMATS, ReadDtype, Recurrence
from tuning.roofline import step_traffic
from tuning.shapes import lookup

F32, F16, BF16, FP8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
HEADS, KEY_HEADS, WINDOW, STEP, SAMPLE, CHUNK = 4, 2, 16, 4, 512, 256
LAYERS: dict[Recurrence, LayerSpec] = {
    "mamba2": LayerSpec("mamba2", HEADS, KEY_HEADS, 64, 128),
    "gdn": LayerSpec("gdn", HEADS, KEY_HEADS, 128, 128),
    "kda": LayerSpec("kda", HEADS, HEADS, 128, 128),
}
KINDS = ("states", "records")  # of schemes: what is stored in other ways
REGIMES = ("init", "long", "near-one")
MEMORY = (16.0, 8192.0)  # tokens
MAX_TOKENS = 131_072
LIVE = 8
FLAGSHIPS: dict[Recurrence, str] = {"mamba2": "nemotron-3-super", "gdn": "qwen3.5-122b-a10b", "kda": "glm-5.3-flash"}
SPEC = ReplaySpec(WINDOW, STEP, F32, F32)
Store = Callable[[Pool, int], None]


class Scheme(NamedTuple):
    """A precision of the state.

    Args:
        name: as the tables call it.
        bits: of a value in the memory that a step reads, scales included, and in the checkpoint, which a fold reads.
        replay: what the pool is made of; schemes that agree in it run together, a slot each.
        store: what becomes of the checkpoint, held in float32, and of its copy after the fold of that number.
        records: how records lie in rings, by the ring's name; float32 where it is not named.
    """

    name: str
    bits: tuple[float, float]
    replay: ReplaySpec
    store: Store | None = None
    records: Mapping[str, ReadDtype] = {}


def shared(read_dtype: Any) -> Store:
    """The checkpoint itself is stored as a read copy would be; in 16 bits as a checkpoint of that dtype."""

    def store(pool: Pool, fold: int) -> None:
        pool.checkpoint.copy_(quant.decode(quant.encode(pool.checkpoint, read_dtype), read_dtype))

    return store


def stochastic(dtype: torch.dtype) -> Store:
    """The checkpoint is of a 16-bit dtype, rounded stochastically, and its copy is made from that."""

    def store(pool: Pool, fold: int) -> None:
        slot = torch.zeros(1, dtype=torch.int64)
        pool.checkpoint.copy_(storage.round_state(pool.checkpoint, dtype, slot, torch.tensor([fold])))
        storage.write_copy(pool, slot)

    return store


def shared_stochastic(form: formats.Stochastic, largest: float) -> Store:
    """The checkpoint is e4m3 or int8 with a scale a row, rounded stochastically."""

    def store(pool: Pool, fold: int) -> None:
        heads, rows, columns = pool.checkpoint.shape[1:]
        scale = pool.checkpoint.abs().amax(-1, keepdim=True).clamp_min(quant.LEAST_SCALE) / largest
        words = philox.state_words(torch.zeros(1).long(), torch.tensor([fold]), (heads, rows, columns // 4))
        pool.checkpoint.copy_(formats.round_stochastic(pool.checkpoint / scale, form, words) * scale)

    return store


def plain_scales(pool: Pool, fold: int) -> None:
    """The NVFP4 copy takes each block's scale from its largest value."""
    for name, part in quant.encode(pool.checkpoint, "nvfp4", quant.PLAIN).items():
        getattr(pool, f"read_{name}").copy_(part)


def two_axes(pool: Pool, fold: int) -> None:
    """NVFP4 after division by column scales, held in float16, whose own error is a hundredth of NVFP4's."""
    columns = quant.fit_columns(pool.checkpoint)
    assert pool.read_codes is not None
    pool.read_codes.copy_(quant.decode(quant.encode(pool.checkpoint / columns, "nvfp4"), "nvfp4") * columns)


def _read(dtype: Any) -> ReplaySpec:
    return replace(SPEC, read_dtype=dtype)


NVFP4 = 4 + 8 / 16 + 32 / (16 * 128)
ROW_8 = 8 + 32 / 128
RECORDS: dict[str, dict[str, ReadDtype]] = {
    "bf16 records": {"value": BF16, "key": BF16},
    "bf16 values": {"value": BF16},
    "fp16 values": {"value": F16},
    "int8 values": {"value": torch.int8},
    "fp8 values": {"value": FP8},
    "nvfp4 values": {"value": "nvfp4"},
    "int8 keys": {"key": torch.int8},
    "fp8 keys": {"key": FP8},
    "int8 records": {"value": torch.int8, "key": torch.int8},
    "bf16 decays": {"decay": BF16},
    "fp8 decays": {"decay": FP8},
    "int8 records, fp8 decays": {"value": torch.int8, "key": torch.int8, "decay": FP8},
}
SCHEMES = (
    Scheme("fp32", (32, 32), SPEC),
    Scheme("fp16", (16, 16), SPEC, shared(F16)),
    Scheme("fp16 SR", (16, 16), SPEC, stochastic(F16)),
    Scheme("bf16", (16, 16), SPEC, shared(BF16)),
    Scheme("bf16 SR", (16, 16), SPEC, stochastic(BF16)),
    Scheme("shared int8", (ROW_8, ROW_8), SPEC, shared(torch.int8)),
    Scheme("shared int8 SR", (ROW_8, ROW_8), SPEC, shared_stochastic("int8", formats.INT8_MAX)),
    Scheme("shared fp8", (ROW_8, ROW_8), SPEC, shared(FP8)),
    Scheme("shared fp8 SR", (ROW_8, ROW_8), SPEC, shared_stochastic("e4m3", formats.E4M3_MAX)),
    Scheme("shared nvfp4", (NVFP4, NVFP4), SPEC, shared("nvfp4")),
    Scheme("fp32 + bf16 read", (16, 32), _read(BF16)),
    Scheme("fp32 + int8 read", (ROW_8, 32), _read(torch.int8)),
    Scheme("fp32 + fp8 read", (ROW_8, 32), _read(FP8)),
    Scheme("fp32 + mxfp8 read", (8.25, 32), _read("mxfp8")),
    Scheme("fp32 + nvfp4 read, amax", (NVFP4, 32), _read("nvfp4"), plain_scales),
    Scheme("fp32 + nvfp4 read", (NVFP4, 32), _read("nvfp4")),
    Scheme("fp32 + nvfp4 read, two axes", (NVFP4 + 32 / 128, 32), _read(F16), two_axes),
    Scheme("fp16 SR + nvfp4 read", (NVFP4, 16), _read("nvfp4"), stochastic(F16)),
    Scheme("bf16 SR + nvfp4 read", (NVFP4, 16), _read("nvfp4"), stochastic(BF16)),
    *(
        Scheme(f"{state}, {name}", bits, spec, records=records)
        for state, bits, spec in (("fp32", (32.0, 32.0), SPEC), ("fp32 + nvfp4 read", (NVFP4, 32.0), _read("nvfp4")))
        for name, records in RECORDS.items()
    ),
)


def _inverse_softplus(dt: Tensor) -> Tensor:
    return dt + torch.log(-torch.expm1(-dt))


def _log_uniform(low: float, high: float, *shape: int) -> Tensor:
    """Quantiles of a log-uniform distribution, in a fixed shuffled order."""
    count = math.prod(shape)
    share = (torch.randperm(count, generator=torch.Generator().manual_seed(1)) + 0.5) / count
    return torch.exp(math.log(low) + share * math.log(high / low)).view(shape)


def parameters(kind: Recurrence, regime: str) -> dict[str, Tensor]:
    """A (A_log) and dt_bias of a layer."""
    shape = (HEADS, LAYERS[kind].d_state) if kind == "kda" else (HEADS,)
    rate = (torch.arange(HEADS) + 0.5) / HEADS * (16.0 if kind == "gdn" else 15.0) + (0.0 if kind == "gdn" else 1.0)
    dt = _log_uniform(1e-3, 1e-1, *shape)
    bias = torch.ones(HEADS) if kind == "gdn" else _inverse_softplus(dt)
    if regime != "init":
        decay = torch.full(shape, 1e-6) if regime == "near-one" else 1 / _log_uniform(*MEMORY, *shape)
        if kind == "mamba2":  # dt is also the size of an update
            rate = decay / dt
        else:
            rate, bias = torch.ones(HEADS), _inverse_softplus(decay)
    return {"A": -rate, "dt_bias": bias} if kind == "mamba2" else {"A_log": rate.log(), "dt_bias": bias}


def draw(kind: Recurrence, regime: str, tokens: int, generator: torch.Generator) -> Inputs:
    """So many tokens of one row."""
    layer = LAYERS[kind]
    given: dict[str, Any] = parameters(kind, regime)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=generator)

    def projected(*shape: int) -> Tensor:
        return torch.nn.functional.silu(normal(*shape)).bfloat16().float()

    q, k = (projected(layer.num_k_heads, layer.d_state) for _ in range(2))
    v, gate = projected(HEADS, layer.head_dim), normal(HEADS)
    if kind == "mamba2":
        return Mamba2Inputs(v, gate, k, q, dt_softplus=True, **given)
    if kind == "gdn":
        return GdnInputs(q, k, v, gate, normal(HEADS), **given)
    return KdaInputs(q, k, v, normal(HEADS, layer.d_state), gate, **given)


def _tokens(inputs: Any, first: int, last: int, rows: int) -> Any:
    """Some tokens, the same for each of so many rows."""
    cut = {name: t[:, first:last] for name, t in inputs._asdict().items() if isinstance(t, Tensor) and t.dim() > 2}
    return inputs._replace(**{name: t.expand(rows, *t.shape[1:]) for name, t in cut.items()})


class Run:
    """Schemes with one spec on their way through the tokens."""

    def __init__(self, schemes: Sequence[Scheme], layer: LayerSpec) -> None:
        spec, count = schemes[0].replay, len(schemes)
        self.schemes, self.folds, self.slots = schemes, 0, torch.arange(count)
        self.pool, self.cursors = make_pool(layer, spec, count), make_cursors(spec, count)
        parts = dict(zip(record_shapes(layer, spec), self.pool.tensors, strict=True))
        self.pools = [Pool(layer, spec, **{name: t[i : i + 1] for name, t in parts.items()}) for i in range(count)]

    def step(self, inputs: Any) -> tuple[Tensor, bool]:
        """Outputs of `STEP` tokens, [schemes, STEP, HV, V], and whether they come from folded states."""
        value = inputs.x if isinstance(inputs, Mamba2Inputs) else inputs.v
        out = torch.zeros(value.shape, dtype=F32)
        live = int(self.cursors.num_committed[0])
        folds = live + STEP > WINDOW
        replay.step(self.pool, self.cursors, inputs, cache_indices=self.slots, out=out)
        appended = (int(self.cursors.ring_start[0]) + live + torch.arange(STEP)) % SPEC.ring_capacity
        for scheme, pool in zip(self.schemes, self.pools, strict=True):
            if folds and scheme.store is not None:
                scheme.store(pool, self.folds)
            for name, form in scheme.records.items():
                ring = getattr(pool, name)
                ring[:, :, appended] = rounded_records(ring[:, :, appended], form)
        self.folds += folds
        replay.commit(self.cursors, cache_indices=self.slots, num_draft=STEP)
        return out, folds

    def states(self, A: Tensor | None) -> Tensor:
        """The states that the checkpoints will be with all records, not rounded."""
        return replay.fold(self.pool, self.cursors, self.slots, self.cursors.num_committed.long(), A=A, dtype=F32)


def rounded_records(records: Tensor, form: ReadDtype) -> Tensor:
    """Records [..., n], each with scales of its own."""
    return quant.decode(quant.encode(records[..., None, :], form), form).squeeze(-2)


def saved_share(kind: Recurrence, records: Mapping[str, ReadDtype]) -> float:
    """What such records save of the bytes of a step of the flagship: of those it reads, and of the one it appends."""
    layer, saved_bits = lookup(FLAGSHIPS[kind]).layer, 0.0
    step = step_traffic(layer, ReplaySpec(read_dtype="nvfp4"), rows=1, live_records=LIVE)
    vectors = {
        "value": (layer.num_v_heads, layer.head_dim, 16),
        "key": (layer.num_k_heads, layer.d_state, 16),
        "decay": (layer.num_v_heads, layer.d_state, 32),
    }
    for name, dtype in records.items():
        heads, values, bits = vectors[name]
        form = READ_FORMATS[dtype]
        scales = 32 * (form.row_scale or form.tile_rows > 0) + (8 * values / form.block if form.block else 0)
        saved_bits += heads * (values * (bits - form.bits) - scales)
    return (LIVE + 1) * saved_bits / 8 / step.total_bytes


def study(
    kind: Recurrence,
    regime: str,
    lengths: Sequence[int],
    schemes: Sequence[Scheme] = SCHEMES,
    say: Callable[[str], object] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """An entry for each length and scheme.

    Args:
        lengths: ascending multiples of `CHUNK`, `SAMPLE` or more.
        say: is told how far the run is.
    """
    layer, generator = LAYERS[kind], torch.Generator().manual_seed(0)
    schemes = [scheme for scheme in schemes if layer.decays_per_channel or "decay" not in scheme.records]
    specs = dict.fromkeys(scheme.replay for scheme in schemes)
    runs = [Run([scheme for scheme in schemes if scheme.replay == spec], layer) for spec in specs]
    exact = torch.zeros(1, HEADS, layer.head_dim, layer.d_state, dtype=torch.float64)
    errors: list[list[Tensor]] = [[] for _ in runs]
    began = time.perf_counter()
    for first in range(0, lengths[-1], CHUNK):
        inputs = draw(kind, regime, CHUNK, generator)
        want, exact = recurrence.run(inputs, exact)
        due = next(length for length in lengths if length > first)
        for run, found in zip(runs, errors, strict=True):
            for at in range(0, CHUNK, STEP):
                out, folded = run.step(_tokens(inputs, at, at + STEP, len(run.schemes)))
                if not folded and first + at >= due - SAMPLE:
                    found.append(relative(out, want[:, at : at + STEP], 1))
        if first + CHUNK < due:
            continue
        entries = {}
        for run, found in zip(runs, errors, strict=True):
            states = relative(run.states(getattr(inputs, "A", None)), exact, 3)
            for scheme, outputs, state in zip(run.schemes, torch.cat(found, 1), states, strict=True):
                entries[scheme.name] = entry(kind, regime, scheme, due, outputs, float(state))
            found.clear()
        yield from (entries[scheme.name] for scheme in schemes)
        say(f"{kind} {regime}: {due} tokens, {time.perf_counter() - began:.0f} s")


def relative(got: Tensor, exact: Tensor, axes: int) -> Tensor:
    """Relative 2-norm of the error over the last axes."""
    over = tuple(range(-axes, 0))
    return torch.linalg.vector_norm(got - exact, dim=over) / torch.linalg.vector_norm(exact, dim=over)


def entry(kind: Recurrence, regime: str, scheme: Scheme, tokens: int, errors: Tensor, state: float) -> dict[str, Any]:
    """A record of one scheme at one length."""
    return {
        "recurrence": kind,
        "regime": regime,
        "scheme": scheme.name,
        "bits_read": round(scheme.bits[0], 3),
        "bits_checkpoint": round(scheme.bits[1], 3),
        "tokens": tokens,
        "mean": float(f"{float(errors.mean()):.4g}"),
        "p99": float(f"{float(errors.flatten().double().quantile(0.99)):.4g}"),
        "state_error": float(f"{state:.4g}"),
        **({"saves": float(f"{saved_share(kind, scheme.records):.4g}")} if scheme.records else {}),
    }


def precision_tables(entries: Iterable[Mapping[str, Any]], kinds: Sequence[str] = KINDS) -> str:
    """Markdown, errors in percent: for more than two lengths one table of the means; else for each length the schemes
    by recurrence and regime, those of states with mean / 99th percentile, those of records with outputs / state."""
    found = list(entries)
    lengths = sorted({one["tokens"] for one in found})
    if len(lengths) > 2:
        return _by_length(found, lengths)
    parts = ([one for one in found if (one["tokens"], kind_of(one)) == part] for part in product(lengths, kinds))
    return "\n\n".join(_at_length(part) for part in parts if part)


def kind_of(entry: Mapping[str, Any]) -> str:
    """Which of `KINDS` the scheme of an entry is of."""
    return KINDS["saves" in entry]


def _at_length(entries: Sequence[Mapping[str, Any]]) -> str:
    at = {(one["scheme"], one["recurrence"], one["regime"]): one for one in entries}
    columns = list(dict.fromkeys(key[1:] for key in at))
    about, other = ("saves", "state_error") if kind_of(entries[0]) == "records" else ("bits read", "p99")
    lines = [f"| {entries[0]['tokens']} tokens | {about} | " + " | ".join(map(" ".join, columns)) + " |"]
    lines.append("|---|---|" + "---|" * len(columns))
    for name in dict.fromkeys(key[0] for key in at):
        row = [at.get((name, *column)) for column in columns]
        texts = ["" if one is None else f"{_percent(one['mean'])} / {_percent(one[other])}" for one in row]
        if about == "saves":
            saves = {one["recurrence"]: f"{100 * one['saves']:.1f}" for one in row if one is not None}
            head = " / ".join(saves.values())
        else:
            head = f"{next(one for one in row if one is not None)['bits_read']:g}"
        lines.append(f"| {name} | {head} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _by_length(entries: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> str:
    lines = ["| tokens | | " + " | ".join(map(str, lengths)) + " |", "|---|---|" + "---|" * len(lengths)]
    rows: dict[tuple[str, str], dict[int, float]] = {}
    for one in entries:
        where = f"{one['recurrence']} {one['regime']}"
        rows.setdefault((one["scheme"], where), {})[one["tokens"]] = one["mean"]
    for (name, where), means in rows.items():
        texts = [_percent(means[tokens]) if tokens in means else "" for tokens in lengths]
        lines.append(f"| {name} | {where} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.2g}"
