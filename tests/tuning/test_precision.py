"""The study of precisions decays as it says, measures what it says, and orders the schemes as their definitions demand.

512 tokens of the regime without forgetting are enough for every order that is claimed: float32 is exact, a read copy
errs less than a state that is stored like it, and for Mamba-2, whose records are inputs, it leaves the state exact.
Bits of a scheme are compared with the bytes of its pool, records that the study rounds with those of pools that hold
such dtypes, and what they save with traffic of the specs that can say it.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from replayssm import ReplaySpec, bytes_per_slot
from replayssm.reference import recurrence
from replayssm.spec import RECURRENCES, Recurrence
from tuning.__main__ import main
from tuning.documents import refreshed
from tuning.precision import (
    FLAGSHIPS,
    LAYERS,
    MEMORY,
    RECORDS,
    REGIMES,
    SCHEMES,
    SPEC,
    Scheme,
    draw,
    precision_tables,
    relative,
    saved_share,
    study,
)
from tuning.roofline import step_traffic
from tuning.shapes import lookup

F16, BF16 = torch.float16, torch.bfloat16
BY_NAME = {scheme.name: scheme for scheme in SCHEMES}
DELTA = ("fp32", "fp32, bf16 records", "shared int8", "fp32 + int8 read")


@functools.cache
def errors(kind: Recurrence, *names: str) -> dict[str, dict[str, Any]]:
    found = study(kind, "near-one", [512], [BY_NAME[name] for name in names])
    return {entry["scheme"]: entry for entry in found}


@pytest.mark.parametrize("kind", RECURRENCES)
def test_decays_are_those_of_the_regime(kind: Recurrence) -> None:
    """At a gate of zero: the memory in tokens, 1 over the log-decay, of each head or channel."""
    for regime in REGIMES:
        inputs: Any = draw(kind, regime, 1, torch.Generator().manual_seed(0))
        gate = {"mamba2": "dt", "gdn": "a", "kda": "g"}[kind]
        inputs = inputs._replace(**{gate: torch.zeros_like(getattr(inputs, gate))})
        decay = -recurrence.tokens(inputs, torch.float64).log_decay
        memory = 1 / decay.flatten()
        if regime == "near-one":
            assert torch.allclose(memory, torch.full_like(memory, 1e6), rtol=1e-2)
        elif regime == "long":
            assert MEMORY[0] <= memory.min() < 60 and 2000 < memory.max() <= MEMORY[1] * 1.01
        elif kind == "gdn":  # A in (0, 16] times softplus(1)
            assert (decay > 0).all() and decay.max() <= 16 * math.log1p(math.e)
        else:  # A in [1, 16] times dt in [0.001, 0.1]
            assert decay.min() >= 1e-3 and decay.max() <= 1.6


def test_float32_is_exact_and_a_copy_errs_less_than_a_state_stored_like_it() -> None:
    found = errors("mamba2", "fp32", "shared nvfp4", "fp32 + nvfp4 read", "fp32 + nvfp4 read, amax")
    mean = {name: entry["mean"] for name, entry in found.items()}
    assert mean["fp32"] < 1e-6
    assert mean["fp32 + nvfp4 read"] < 0.95 * mean["fp32 + nvfp4 read, amax"] < 0.7 * mean["shared nvfp4"]
    assert found["fp32 + nvfp4 read"]["state_error"] == found["fp32"]["state_error"] < 1e-6
    assert all(entry["p99"] > entry["mean"] for entry in found.values())


def test_delta_rules_suffer_from_shared_int8_and_from_16_bit_records() -> None:
    """A delta rule computes its records from what it reads, so a copy's error reaches the state, but as noise only."""
    found = errors("gdn", *DELTA)
    assert found["shared int8"]["mean"] > 1.5 * found["fp32 + int8 read"]["mean"]
    assert found["shared int8"]["state_error"] > 3 * found["fp32 + int8 read"]["state_error"]
    assert found["fp32 + int8 read"]["state_error"] > 10 * found["fp32"]["state_error"]
    assert found["fp32, bf16 records"]["mean"] > 100 * found["fp32"]["mean"]


@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [
        ("gdn", "fp32, bf16 records", {"activation_dtype": BF16}),
        ("kda", "fp32, bf16 decays", {"decay_dtype": BF16}),
        ("mamba2", "fp16", {"checkpoint_dtype": F16}),
        ("gdn", "bf16 SR", {"checkpoint_dtype": BF16, "rounding": "stochastic"}),
        ("kda", "fp16 SR + nvfp4 read", {"checkpoint_dtype": F16, "rounding": "stochastic", "read_dtype": "nvfp4"}),
    ],
)
def test_what_the_study_rounds_is_what_a_pool_holds(kind: Recurrence, name: str, changes: Any) -> None:
    """Checkpoints and records that are rounded in float32 memory, for many schemes to run together, against pools of
    those dtypes."""
    spec = Scheme("of the dtypes", BY_NAME[name].bits, replace(SPEC, **changes))
    mine, theirs, exact = study(kind, "long", [512], [BY_NAME[name], spec, BY_NAME["fp32"]])
    assert all(mine[told] == theirs[told] for told in ("mean", "p99", "state_error"))
    assert mine["mean"] > 30 * exact["mean"]  # teeth


@pytest.mark.parametrize("kind", RECURRENCES)
def test_smaller_records_err_by_their_codes(kind: Recurrence) -> None:
    """The steps of int8 are finer than those of FP8 but for numbers far below a record's largest; keys as values. What
    a record lost the state has lost: it errs as the outputs do, where it is not rounded itself."""
    names = ("int8 values", "fp8 values", "nvfp4 values", "fp8 keys", "int8 records")
    found = errors(kind, *(f"fp32, {name}" for name in names))
    int8, fp8, nvfp4, keys, both = (found[f"fp32, {name}"] for name in names)
    assert 1e-3 < int8["mean"] < fp8["mean"] / 2 and fp8["mean"] < nvfp4["mean"] / 2 < 0.1
    assert keys["mean"] > 1.5 * int8["mean"] and int8["mean"] < both["mean"] < 2 * int8["mean"]
    assert all(0.5 < one["state_error"] / one["mean"] < 2.5 for one in found.values())


def test_what_records_save_is_counted() -> None:
    """By hand where no spec says it: 128 heads of 64 values that lose a byte each and get a scale of 4."""
    super_, glm = (lookup(FLAGSHIPS[kind]).layer for kind in ("mamba2", "kda"))
    copy = ReplaySpec(read_dtype="nvfp4")
    total = step_traffic(super_, copy, rows=1, live_records=8).total_bytes
    assert saved_share("mamba2", RECORDS["int8 values"]) == 9 * 128 * (64 - 4) / total
    assert saved_share("mamba2", RECORDS["nvfp4 values"]) == 9 * 128 * (128 - 32 - 4 - 4) / total
    wide, narrow = (
        step_traffic(glm, spec, rows=1, live_records=8).total_bytes for spec in (copy, replace(copy, decay_dtype=BF16))
    )
    assert saved_share("kda", RECORDS["bf16 decays"]) == pytest.approx(1 - narrow / wide)
    assert saved_share("gdn", RECORDS["bf16 records"]) == 0


def test_errors_are_relative_norms() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)
    assert relative(exact + torch.tensor([[0.0, 0.5], [0.0, 0.0]]), exact, 1).tolist() == [0.1, 0.0]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_bits_are_those_of_the_pool(scheme: Any) -> None:
    if scheme.store is not None and scheme.name != "fp32 + nvfp4 read, amax":
        assert scheme.bits[0] <= 16  # of memory that is not the pool's
        return
    layer = LAYERS["gdn"]
    sizes = bytes_per_slot(layer, scheme.replay)
    values = layer.num_v_heads * layer.head_dim * layer.d_state
    copy = sum(size for name, size in sizes.items() if name.startswith("read_"))
    assert scheme.bits == ((copy or sizes["checkpoint"]) * 8 / values, sizes["checkpoint"] * 8 / values)


def test_the_command_writes_a_record_and_prints_its_table(tmp_path: Path) -> None:
    words = ["precision", "--recurrence", "kda", "--regime", "init", "--scheme", "fp16", "--tokens", "512"]
    result = CliRunner().invoke(main, [*words, "--json", str(tmp_path / "record.json")])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "record.json").read_text())
    assert [entry["scheme"] for entry in record["entries"]] == ["fp16"] and "float64" in record["protocol"]
    assert precision_tables(record["entries"]) in result.output and "| fp16 | 16 |" in result.output
    assert CliRunner().invoke(main, [*words[:-1], "513"]).exit_code == 2


def test_records_have_a_table_of_their_own() -> None:
    found = [*study("kda", "init", [512], [BY_NAME["fp32"], BY_NAME["fp32, fp8 decays"]])]
    states, records = precision_tables(found).split("\n\n")
    assert (precision_tables(found, ["states"]), precision_tables(found, ["records"])) == (states, records)
    head, _, row = records.splitlines()
    assert head == "| 512 tokens | saves | kda init |"
    mean, state = (f"{100 * found[1][name]:.2g}" for name in ("mean", "state_error"))
    assert row == f"| fp32, fp8 decays | {100 * found[1]['saves']:.1f} | {mean} / {state} |"


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "precision.md"
MEANS = {
    (entry["scheme"], entry["recurrence"], entry["regime"]): entry["mean"]
    for entry in json.loads((DOCUMENT.parent / "records" / "2026-11-30-cpu-precision-2048.json").read_text())["entries"]
}
COLUMNS = [key[1:] for key in MEANS if key[0] == "fp32" and key[1:] != ("gdn", "init")]  # which looks exact
COPY = "fp32 + nvfp4 read"


def spread(name: str, beside: str | None = None, columns: Any = COLUMNS) -> tuple[float, float]:
    """The least and the largest mean error of a scheme in percent, or how many times that of another it is."""
    found = [MEANS[(name, *column)] / (MEANS[(beside, *column)] if beside else 0.01) for column in columns]
    return min(found), max(found)


def test_the_document_is_made_from_its_records() -> None:
    assert refreshed(DOCUMENT) == DOCUMENT.read_text()


def prose() -> str:
    """The document, however its lines are broken."""
    return " ".join(DOCUMENT.read_text().split())


@pytest.mark.parametrize(
    "name",
    [
        "fp16",
        "fp32 + bf16 read",
        "fp32 + int8 read",
        COPY,
        *(f"shared {form}" for form in ("int8", "fp8", "nvfp4")),
        "fp32, int8 records",
    ],
)
def test_the_prose_quotes_the_record(name: str) -> None:
    low, high = spread(name)
    assert f" {low:.2g} to {high:.2g} %" in prose()


@pytest.mark.parametrize("name", ["bf16 records", "bf16 values", "fp16 values"])
def test_the_prose_quotes_the_record_of_delta_rules(name: str) -> None:
    low, high = spread(f"fp32, {name}", columns=[one for one in COLUMNS if one[0] != "mamba2"])
    assert f"{low:.2g} to {high:.2g} %" in prose()


def test_the_prose_quotes_the_record_of_lengths() -> None:
    """The most that a copy errs; what nearest and stochastic rounding err in the end, where nothing is forgotten."""
    records = (DOCUMENT.parent / "records" / f"2026-11-30-cpu-precision-{name}.json" for name in ("near-one", "long"))
    found, long = (json.loads(path.read_text())["entries"] for path in records)
    text = prose()
    assert f"at most {100 * max(one['mean'] for one in found if one['scheme'] == COPY):.2g} %" in text
    last = {
        one["scheme"]: 100 * one["mean"] for one in found if one["tokens"] == 131_072 and one["recurrence"] == "mamba2"
    }
    for name, known in (("shared fp8", "shared FP8"), ("bf16", "bf16"), ("fp16", "float16")):
        assert f"{last[name]:.2g} and {last[name + ' SR']:.2g} % ({known})" in text
    first, *_, end = (e["mean"] for e in long if (e["scheme"], e["recurrence"]) == ("shared fp8", "mamba2"))
    assert f"errs {100 * first:.2g} % after 1,024 tokens and {100 * end:.2g} % after 32,768" in text


def test_the_prose_quotes_ratios_of_the_record() -> None:
    text = prose()
    low, high = spread(COPY, f"{COPY}, amax")
    assert f"| {low:.2f} to {high:.2f} |" in text
    low, high = spread("shared nvfp4", COPY, [one for one in COLUMNS if one[1] != "init"])
    assert f"{low:.2g} to {high:.2g} times as much where memory is long" in text
    parts = {f"fp32 + {form} read": "fp32 + int8 read" for form in ("fp8", "mxfp8")}
    low, high = (f([spread(*pair)[i] for pair in parts.items()]) for i, f in enumerate((min, max)))
    assert f"FP8 and MXFP8 err {low:.0f} to {high:.0f} times as much" in text
    parts = {f"fp32, fp8 {what}": f"fp32, int8 {what}" for what in ("values", "keys")}
    low, high = (f([spread(*pair)[i] for pair in parts.items()]) for i, f in enumerate((min, max)))
    assert f"errs {low:.1f} to {high:.1f} times as much" in text
    low, high = spread(f"{COPY}, int8 records", COPY)
    assert f"add {100 * low - 100:.1f} to {100 * high - 100:.0f} % to its error" in text
    low, high = spread(f"{COPY}, nvfp4 values", COPY)
    assert f"the error is {low:.1f} to {high:.1f} times that of the copy" in text
    low, high = spread(f"{COPY}, fp8 decays", COPY, [one for one in COLUMNS if one[0] == "kda"])
    assert 0.998 < low < high < 1.002
    for form in ("fp8", "bf16"):
        _, most = spread(f"fp32, {form} decays", columns=[one for one in COLUMNS if one[0] == "kda"])
        assert f"cost at most {most:.2g} %" in text
