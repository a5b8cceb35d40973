"""The time of a step: each bound by itself on a kernel written down here, and the comparison that the documents show.

Times are checked against formulas over counts that are known by hand, with the device's constants; the record of the
comparison is what the model says today of a few of its entries, and as near to the measured times as the document says.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from cute_kernels.arch import ARCHES
from cute_kernels.configs import StepConfig
from replayssm.spec import ReplaySpec
from replayssm.tuned import Choice, read_table
from tests.tuning.test_sass import needs_sass, program
from tuning import prediction
from tuning.__main__ import main
from tuning.devices import CHAIN_US, CONTENTION, CYCLES_PER_INSTRUCTION, DEVICES, OVERLAP, ROUND_US, SCHEDULERS
from tuning.documents import refreshed
from tuning.matrix import StepCase
from tuning.predict import Kernel, instructions, pipe_cycles, pipe_of, predict
from tuning.prediction import (
    WITHIN,
    compared,
    comparison,
    kernels,
    key_of,
    predicted_choice,
    summary_table,
)
from tuning.sass import Instruction
from tuning.shapes import lookup
from tuning.space import candidates
from tuning.tuner import Field, Job, launched_key

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT, RECORD = ROOT / "docs" / "prediction.md", ROOT / "docs" / "records" / "prediction.json"
H200, B300 = DEVICES["H200"], DEVICES["B300"]


def case(rows: int, what: str = "nonflush", read: Any = None) -> StepCase:
    replay = ReplaySpec(16, 1, torch.float32, torch.bfloat16, read_dtype=read)
    return StepCase(lookup("nemotron-3-super"), replay, rows, what)


def kernel(body: str, registers: int = 32, read: Any = None, **config: int) -> Kernel:
    """A step of Super whose warps run `body` around one copy, with a fold of four trips of `LDG, FFMA, STG`."""
    text = f"""
    UBLKCP.S.G [UR10], [UR40], UR6
    {body}
    @P0 BRA `(.L_x_1)
    EXIT
    .L_x_1:
    MOV R6, RZ
    .L_x_3:
    LDG.E.128 R8, [R2.64]
    FFMA R8, R8, R7, R9
    STG.E.128 [R2.64], R8
    IADD3 R6, R6, 0x1, RZ
    ISETP.NE.U32.AND P0, PT, R6, 0x4, PT
    @P0 BRA `(.L_x_3)
    EXIT
    """
    key = key_of(case(1, read=read), StepConfig(**{"warps": 4, **config}))
    return Kernel(key, "sm_90a", program(text), registers, 0)


def test_few_instructions_are_bound_by_memory() -> None:
    step = case(256)
    found = predict(kernel("NOP"), step, H200)
    traffic = step.traffic(8, 256)
    written = traffic.outputs_bytes + traffic.appends_bytes
    memory = (traffic.total_bytes - written) / H200.read_rate + written / H200.write_rate
    assert found.bound == "memory" and found.memory_bytes == traffic.total_bytes
    assert math.isclose(found.parts["memory"], memory)
    assert memory + H200.launch_us + CHAIN_US < found.us < 1.02 * (memory + H200.launch_us + CHAIN_US)


@pytest.mark.parametrize(
    ("line", "pipe", "cycles"),
    [("FFMA R0, R1, R2, R0", "issue", 1), ("LOP3.LUT R0, R1, R2, R0", "alu", 2), ("MUFU.EX2 R0, R1", "xu", 8)],
)
def test_many_instructions_are_bound_by_their_pipe(line: str, pipe: str, cycles: int) -> None:
    found = predict(kernel("\n".join([line] * 5000)), case(256), H200)
    assert found.bound == pipe
    ctas, warps = 256 * 128, 4
    busy = 5000 * cycles * warps * ctas / (132 * 4 * H200.clock_mhz)
    resident = found.occupancy * warps / SCHEDULERS
    assert found.parts[pipe] == pytest.approx(busy * (1 + CONTENTION / resident), rel=0.01)
    assert found.us > found.parts[pipe]


def test_few_ctas_on_a_multiprocessor_bound_a_step() -> None:
    roomy, tight = (predict(kernel("FADD R0, R0, R1\n" * 800, registers), case(256), H200) for registers in (32, 255))
    assert (roomy.occupancy, tight.occupancy) == (5, 2)  # by shared memory, by registers
    assert tight.bound == "occupancy" and tight.us > roomy.us
    own = CHAIN_US + 803 * CYCLES_PER_INSTRUCTION / H200.clock_mhz
    assert math.isclose(tight.parts["occupancy"], 256 * 128 / 132 / 2 * own, rel_tol=0.01)


def test_one_row_is_bound_by_the_floor_and_a_long_warp() -> None:
    short, long = (predict(kernel("FADD R0, R0, R1\n" * n), case(1), H200) for n in (10, 20_000))
    assert short.bound == "floor" and long.bound in ("warp", "issue")
    assert long.parts["warp"] == pytest.approx(20_003 * CYCLES_PER_INSTRUCTION / H200.clock_mhz, rel=1e-3)
    assert long.us - short.us > long.parts["warp"]


def test_a_fold_waits_in_its_loop_and_reads_again_what_it_encodes() -> None:
    small, large = (
        predict(kernel("NOP", read="nvfp4", warps=1), case(rows, "flush", "nvfp4"), H200) for rows in (1, 256)
    )
    assert small.parts["warp"] > 4 * ROUND_US
    once = case(256, "flush", "nvfp4").traffic(16, 256).total_bytes
    codes = 256 * 128 * 64 * 128 // 2
    assert large.memory_bytes == once + codes  # what the loop loads here is less than the state, so nothing twice
    again = kernel("NOP", read="nvfp4", warps=1)
    text = program("UBLKCP.S.G [UR10], [UR40], UR6\nMOV R6, RZ\n.L_x_3:\nLDG.E.128 R8, [R2.64]\nSTG.E.128 [R2.64], R8\n"
                   "IADD3 R6, R6, 0x1, RZ\nISETP.NE.U32.AND P0, PT, R6, 0x80, PT\n@P0 BRA `(.L_x_3)\nEXIT")  # fmt: skip
    twice = predict(replace(again, program=text), case(256, "flush", "nvfp4"), H200)
    assert twice.memory_bytes == once + codes + 256 * 128 * 64 * 128 * 4


def test_rows_that_fold_among_others_finish_late() -> None:
    step = kernel("NOP\n" * 100)
    reads, folds, mixed = (predict(step, case(256, what), H200) for what in ("nonflush", "flush", "mixed"))
    assert reads.us < mixed.us < folds.us


def test_busy_resources_get_in_each_others_way() -> None:
    found = predict(kernel("FFMA R0, R1, R2, R0\n" * 1500), case(256), H200)
    memory, issue = found.parts["memory"], found.parts["issue"]
    both = (memory**OVERLAP + issue**OVERLAP) ** (1 / OVERLAP)
    assert found.us == pytest.approx(both + found.parts["floor"], rel=0.01)


def test_the_architecture_must_be_the_devices() -> None:
    with pytest.raises(ValueError, match="sm_103a"):
        predict(kernel("NOP"), case(1), B300)


def test_pipes_of_opcodes() -> None:
    wanted = {
        "UTCHMMA": "tcgen05",
        "LDTM": "tensor memory",
        "FFMA2": "fma",
        "FFMA": "fma",
        "HMMA": "tensor",
        "LOP3": "alu",
        "LDS": "lsu",
        "BRA": "branch",
        "UMOV": "uniform",
    }
    assert {opcode: pipe_of(opcode)[0] for opcode in wanted} == wanted
    assert pipe_of("FFMA2")[1] == 2 * pipe_of("FFMA")[1] and pipe_of("XYZ") == ("other", 0.0)
    issued = Counter({Instruction(None, "FFMA", ()): 3, Instruction(None, "LDS.128", ()): 2})
    assert pipe_cycles(issued) == {"issue": 5, "fma": 3} and instructions(issued) == {"fma": 3, "lsu": 2}


def recorded() -> list[dict[str, Any]]:
    return json.loads(RECORD.read_text())["predictions"]


def test_the_document_shows_the_record() -> None:
    assert refreshed(DOCUMENT) == DOCUMENT.read_text()


def test_predictions_are_near_the_measurements() -> None:
    """15 % is what the document claims of 19 in 20 steps that only read, and of 4 in 5 of the others."""
    reads, others = [], []
    for entry in recorded():
        ratio = entry["predicted"]["H200"]["us"] / entry["measured"]["median_us"]
        (reads if entry["what"] == "nonflush" else others).append(ratio)
    for ratios, share in ((reads, 0.95), (others, 0.8)):
        assert len(ratios) > 80 and sum(abs(ratio - 1) <= WITHIN for ratio in ratios) / len(ratios) >= share
    assert math.isclose(math.exp(sum(map(math.log, reads)) / len(reads)), 1, abs_tol=0.03)  # neither high nor low


@needs_sass
def test_the_record_is_what_the_model_says() -> None:
    """One layer of each recurrence, on both generations. Where a change of kernels or of the model makes the record
    stale, `python -m tuning predict --against ... --out` makes it anew, with the records that it names."""
    wanted: dict[str, dict[str, Any]] = {}
    for entry in recorded():
        if entry["what"] != "plain":  # which has a kernel of its own
            wanted.setdefault(f"{entry['layer']['recurrence']} {entry['what']}", entry)
    make = kernels()
    for entry in wanted.values():
        record = [ROOT / "docs" / "records" / entry["measured"]["record"]]
        facts = ("layer", "replay", "rows", "num_tokens")
        (one,) = [x for x in compared(record, (entry["what"],)) if all(x.entry[name] == entry[name] for name in facts)]
        for device in (H200, B300):
            found = predict(make(one.key, device.arch), one.case, device)
            assert found.us == pytest.approx(entry["predicted"][device.name]["us"], rel=0.05)


@needs_sass
@pytest.mark.parametrize(
    ("state", "tokens", "what", "slower", "faster"),
    [  # medians on an H200 beside them, 2026-11-29 and 30
        (torch.float32, 8, "nonflush", {"warps": 8, "fold_values": 32}, {"warps": 2, "fold_values": 32}),  # 428, 286
        (torch.bfloat16, 1, "nonflush", {"split": 2}, {"split": 1}),  # 167, 135
    ],
    ids=["warps", "split"],
)
def test_launch_parameters_are_ordered_as_measured(
    state: torch.dtype, tokens: int, what: str, slower: dict[str, int], faster: dict[str, int]
) -> None:
    step = StepCase(lookup("nemotron-3-super"), ReplaySpec(16, tokens, state, torch.bfloat16), 256, what, tokens / 2)

    def predicted(config: dict[str, int]) -> float:
        key = key_of(step, StepConfig(**config, precision="tf32"))  # type: ignore[arg-type]
        return predict(Kernel.compiled(key, "sm_90a"), step, H200).us

    assert predicted(slower) > 1.05 * predicted(faster)


def test_entries_that_say_how_they_were_launched_are_compared(tmp_path: Path) -> None:
    source = ROOT / "docs" / "records" / "2026-12-01-h200-nemotron-3-super-windows.json"
    record = json.loads(source.read_text())
    assert {one.case.replay.window for one in compared([source], ("nonflush",))} == {16, 24, 32, 48}
    assert {one.case.what for one in compared([source])} >= {"nonflush", "flush", "plain"}
    silent = tmp_path / "silent.json"
    entries = [{name: value for name, value in entry.items() if name != "config"} for entry in record["entries"]]
    silent.write_text(json.dumps({**record, "entries": entries}))
    assert not list(compared([silent]))


def test_a_summary_counts_what_is_missed() -> None:
    source = ROOT / "docs" / "records" / "2026-12-01-h200-kimi-k3-tp8.json"
    entries = comparison([source], [H200], lambda key, arch: replace(kernel("NOP"), key=key), lambda one: None)
    assert {entry["what"] for entry in entries} >= {"nonflush", "flush", "plain"}
    for entry in entries:
        entry["predicted"]["H200"]["us"] = entry["measured"]["median_us"] * (1.16 if entry["what"] == "flush" else 1.14)
    table = summary_table(entries)
    assert "| nonflush | 2 | 2 | 1.14 | 1.14 |" in table and "| flush | 2 | 0 | 1.16 | 1.16 |" in table
    assert table.count("| flush |") == 3  # its line, and both entries among the missed


def test_another_choice_than_the_heuristics_must_be_clearly_faster() -> None:
    """By more than the model has been seen to overrate a choice; one that spills is none."""
    job = Job(lookup("nemotron-3-super"), case(256).replay, 256)
    tried = candidates(job.target, 256, ARCHES["sm_90a"])[:3]
    field = Field(job, tried, ())
    kernels = [kernel("FADD R0, R0, R1\n" * n) for n in (3000, 2900, 500)]
    by_key = {
        launched_key(job, one): replace(made, key=launched_key(job, one))
        for one, made in zip(tried, kernels, strict=True)
    }

    def chosen(**changed: int) -> Choice:
        found = {**by_key, launched_key(job, tried[2]): replace(by_key[launched_key(job, tried[2])], **changed)}
        return predicted_choice(field, H200, lambda key, arch: found[key])

    assert chosen().parameters == tried[2].parameters and chosen().runner_up == tried[1].parameters
    assert chosen().p10_us is None and chosen().median_us < chosen().runner_up_us
    assert chosen(frame_bytes=8).parameters == tried[0].parameters  # the second is too little faster


@needs_sass
def test_a_predicted_table_is_made_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "tuned.json"
    words = [
        "tune",
        "--predict",
        "--model",
        "nemotron-3-nano-4b",
        "--batch",
        "8",
        "--arch",
        "sm_103a",
        "--out",
        str(out),
    ]
    made = CliRunner().invoke(main, words)
    assert made.exit_code == 0, made.output
    table = read_table(out)
    assert (table.basis, table.arch) == ("predicted", "sm_103a") and "B300" in table.device
    ((shape, choices),) = table.entries.items()
    assert shape.layer == lookup("nemotron-3-nano-4b").layer and choices[8].median_us > 5
    refused = CliRunner().invoke(main, words[:-2])
    assert refused.exit_code == 2 and "--out" in refused.output
    refused = CliRunner().invoke(main, [*words, "--read", "nvfp4"])
    assert refused.exit_code == 2 and "steps without a copy" in " ".join(refused.output.split())
    assert read_table(out) == table
    out.write_text(json.dumps({**json.loads(out.read_text()), "basis": "measured"}))
    mixed = CliRunner().invoke(main, words)
    assert mixed.exit_code == 2 and "measured" in mixed.output


@needs_sass
def test_the_command(tmp_path: Path) -> None:
    printed = CliRunner().invoke(
        main, ["predict", "--model", "qwen3.5-4b", "--batch", "8", "--device", "B200", "--json"]
    )
    assert printed.exit_code == 0, printed.output
    reads, folds = json.loads(printed.output)
    assert (reads["what"], folds["what"], reads["device"], reads["rows"]) == ("nonflush", "flush", "B200", 8)
    assert reads["us"] < folds["us"] and reads["pipes"]["issue"] > 0 and reads["shared_bytes"] > 0
    assert reads["instructions"]["fma"] < folds["instructions"]["fma"]


def test_without_a_disassembler_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuning.commands.why_no_sass", lambda: "needs nvdisasm")
    refused = CliRunner().invoke(main, ["predict", "--batch", "1"])
    assert refused.exit_code == 2 and "nvdisasm" in refused.output


def test_tables_need_no_compiler() -> None:
    """Documents are refreshed where nothing is compiled."""
    assert prediction.prediction_table(recorded()).count("\n") > 20
