"""No schedule of a step or a commit deadlocks or races, in shared memory or, between CTAs, in global memory.

The static verifier (`verifier`) decides it for the PTX of sm_103a as it is compiled, launched as the host code launches
it. Grid: every dtype of checkpoint and activations, heads whole and split, a group of two heads and groups of one, all
three ring layouts, both index dtypes, dependent launch; rows that read and rows that fold beside each other and, of
head_dim 80, one that folds, around the end of the ring, and padding; of each delta rule a group of two heads, whole,
and one head, split, whose records are stored in pieces. With several tokens, rows that read and fold, of Mamba-2 a
group of two heads, of Gated DeltaNet a split head, of Kimi Delta Attention one row of a whole head: more of that takes
the tool minutes. Steps that read a copy, of one head and of two heads a CTA, and launches that make copies, in two and
three formats. Readouts on tcgen05 of each kind; of block-scaled ones the tool knows 64 columns or more, so 4 terms of
two probes. A CTA that appends beside one that reads its window is what no schedule of the interpreter shows. The
verdicts stand in docs/records/static.json and must not get worse. Teeth: faults in the PTX, and two rows of one slot,
each change the verdict; faults that the tool cannot see are named as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels.configs import RingLayout, StepConfig
from replayssm import make_pool, model_launch
from replayssm.spec import ReadDtype, Recurrence
from tests.helpers.cases import Case
from tests.helpers.draw import AnyGiven, DeltaGiven
from tests.helpers.oracle import BARE, F32, PAD, Given, Scene
from tests.ptx import recorder
from tests.ptx.launches import Bench, Interpreted
from tests.ptx.verifier import Verdict, tool_version, verify, why_no_verifier

WHY_NOT = why_no_verifier() or recorder.why_no_recorder()
needs_verifier = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
RECORD = Path("docs/records/static.json")
ARCH = "sm_103a"
BF16, F16 = torch.bfloat16, torch.float16
RANKS = {"failed": 0, "not_run": 1, "incomplete": 1, "passed": 2}


def case(
    sizes: tuple[int, int, int, int], window: int, *dtypes: torch.dtype, kind: Recurrence = "mamba2", T: int = 1
) -> Case:
    """A case of (value heads, key heads, head_dim, d_state), dtypes of activation and checkpoint."""
    return Case(kind, *sizes, window, T, *dtypes)


@dataclass(frozen=True)
class Run:
    """A launch to verify: a step, or the commit behind it."""

    case: Case
    counts: tuple[int, ...]
    forced: tuple[int, ...] | None = None
    given: AnyGiven | None = None
    split: int = 1
    pdl: bool = False
    layout: RingLayout = "record_major"
    index: torch.dtype = torch.int32
    commits: bool = False
    read: ReadDtype | None = None
    config: StepConfig | None = None  # else whole heads, or `split` CTAs each

    @property
    def scene(self) -> Scene:
        """Ring starts at the end of the ring, so that records and appends wrap around."""
        return Scene(
            self.case,
            self.counts,
            forced=self.forced,
            given=self.given,
            starts=tuple(self.case.window - i % 2 for i in range(len(self.counts))),
            ring_layout=self.layout,
            index_dtype=self.index,
            read_dtype=self.read,
        )

    def verdict(self, change: Callable[[str], str] = str, *, same_slot: bool = False) -> Verdict:
        """Record the launch and have it verified, with changed PTX, or all rows in the slot of the first, if asked."""
        work = Interpreted.of(self.scene, Bench(ARCH, change=change))
        if same_slot:
            work.cache_indices[:] = int(work.cache_indices[0])
        if self.commits:
            work.commit(num_accepted=torch.ones(len(self.counts), dtype=torch.int32))
        else:
            work.step(config=self.config or StepConfig(self.split), pdl=self.pdl)
        contents = [work.cache_indices]
        if not self.commits:
            contents += [work.cursors.ring_start, work.cursors.num_committed]
            contents += [] if work.force_fold is None else [work.force_fold]
        (launch,) = work.bench.launches
        return verify(launch, tuple(contents))


@dataclass(frozen=True)
class Copies:
    """A launch that makes the read copies of four slots."""

    read: ReadDtype

    def verdict(self) -> Verdict:
        pool = make_pool(SINGLE.layer, replace(SINGLE.replay, read_dtype=self.read), 4)
        slots, bench = torch.arange(4), Bench(ARCH)
        with bench.installed():
            model_launch.cuda_write_read_copy(slots, (pool,))
        (launch,) = bench.launches
        return verify(launch, (slots,))


PAIR, SINGLE = (case((heads, 1, 64, 64), 5, BF16, F32) for heads in (2, 1))
DELTA = replace(SINGLE, recurrence="gdn")
SEVERAL, DELTA_SEVERAL = replace(SINGLE, T=2), replace(DELTA, T=2)
TOGETHER = StepConfig(warps=1, heads=2)
TENSOR = StepConfig(precision="tf32", readout="tcgen05")
RUNS: dict[str, Any] = {
    "step, all inputs, a group of two heads": Run(PAIR, (3, 4, PAD), forced=(1,)),
    "step, two CTAs a head, head-major, no mask": Run(
        case((1, 1, 64, 64), 17, F32, F16), (16, 17), given=Given(D=None, dt_bias=None), split=2, layout="head_major"
    ),
    "step, d_state 128, dependent launch, int64": Run(
        case((1, 1, 64, 128), 16, F16, F16), (9, 16), given=Given(z=False), pdl=True, index=torch.int64
    ),
    "step, head_dim 80, strided, no optional input": Run(
        case((1, 1, 80, 64), 5, F32, BF16), (2,), forced=(0,), given=BARE, layout="strided"
    ),
    "gdn step, a group of two heads": Run(
        case((2, 1, 64, 64), 5, BF16, F32, kind="gdn"), (3, 4, PAD), forced=(1,), given=DeltaGiven(round_beta=True)
    ),
    "gdn step, two CTAs a head, strided": Run(
        case((1, 1, 64, 128), 16, BF16, BF16, kind="gdn"), (9, 16), given=DeltaGiven(l2norm_eps=None), split=2,
        layout="strided"
    ),
    "kda step, a group of two heads": Run(case((2, 1, 64, 64), 5, BF16, F32, kind="kda"), (3, 4, PAD), forced=(1,)),
    "kda step, two CTAs a head, bounded": Run(
        case((1, 1, 64, 64), 3, F16, F16, kind="kda"), (2, 3), given=DeltaGiven(lower_bound=-5.0), split=2
    ),
    "verify 4 tokens, a group of two heads": Run(case((2, 1, 64, 64), 5, BF16, F32, T=4), (1, 3, PAD), forced=(0,)),
    "gdn verify 2 tokens, two CTAs a head": Run(case((1, 1, 64, 64), 5, BF16, BF16, kind="gdn", T=2), (3, 4), split=2),
    "kda verify 2 tokens, a row that reads": Run(replace(DELTA_SEVERAL, recurrence="kda"), (3,)),
    "kda verify 2 tokens, a row that folds": Run(replace(DELTA_SEVERAL, recurrence="kda"), (5,)),
    "step, a copy in fp8": Run(SINGLE, (3, 5), read=torch.float8_e4m3fn),
    "gdn step, a copy in nvfp4": Run(DELTA, (3, 5), read="nvfp4"),
    "step, a copy in nvfp4, two heads a CTA": Run(PAIR, (3, 5, PAD), read="nvfp4", config=TOGETHER),
    "verify 2 tokens, a copy in nvfp4, two heads a CTA": Run(replace(PAIR, T=2), (3, 5), read="nvfp4", config=TOGETHER),
    "tcgen05 verify 2 tokens, float32, two heads a CTA": Run(
        replace(PAIR, T=2), (3, 5), config=replace(TENSOR, warps=2)
    ),
    "tcgen05 gdn verify 2 tokens, bfloat16": Run(replace(DELTA_SEVERAL, checkpoint=BF16), (3, 4), config=TENSOR),
    "tcgen05 kda verify 2 tokens, float32, a row that reads": Run(
        replace(DELTA_SEVERAL, recurrence="kda"), (3,), config=TENSOR
    ),
    "tcgen05 gdn step, a copy in nvfp4, 4 terms": Run(
        DELTA, (3,), read="nvfp4", config=replace(TENSOR, precision="fp32")
    ),
    "tcgen05 verify 2 tokens, a copy in nvfp4, decoded": Run(
        SEVERAL, (3,), read="nvfp4", config=replace(TENSOR, readout="tcgen05_f16")
    ),
    "copies in nvfp4": Copies("nvfp4"),
    "copies in mxfp8": Copies("mxfp8"),
    "copies in int8": Copies(torch.int8),
    "commit, two CTAs": Run(SINGLE, tuple(range(4)) * 40, forced=(0, 5, 130), commits=True),
    "commit, int64": Run(SINGLE, (2, PAD, 5), index=torch.int64, commits=True),
}  # fmt: skip
READS, FOLDS = Run(SINGLE, (3,)), Run(SINGLE, (5,))
TENSOR_READS = Run(SEVERAL, (3,), config=TENSOR)
DECODES = RUNS["tcgen05 verify 2 tokens, a copy in nvfp4, decoded"]
HEADS = RUNS["verify 2 tokens, a copy in nvfp4, two heads a CTA"]


def worse(before: dict[str, Any] | None, now: Verdict, *, same_tools: bool) -> list[str]:
    """What is wrong with a verdict, given the recorded one: a property that it proves no more, or, with the tools that
    the record is of, anything else that it says."""
    if before is None:
        return ["not in the record; run make static"]
    found = [
        f"{name}: {before[name]} -> {getattr(now, name)}: {now.message}"
        for name in ("synchronization", "memory")
        if RANKS[getattr(now, name)] < RANKS[before[name]]
    ]
    same = {name: before[name] for name in asdict(now)} == asdict(now)
    return found or ([] if same or not same_tools else [f"the record says {before}, the tool {now}"])


def tools() -> dict[str, str]:
    import cutlass

    return {"sentryward": tool_version(), "cutlass_dsl": cutlass.__version__, "arch": ARCH}


@pytest.fixture(scope="module")
def record(repository: Path) -> dict[str, Any]:
    return json.loads((repository / RECORD).read_text(encoding="utf-8"))


@needs_verifier
@pytest.mark.parametrize("name", RUNS)
def test_a_verdict_is_no_worse_than_recorded(name: str, record: dict[str, Any]) -> None:
    before = {row["launch"]: row for row in record["verdicts"]}.get(name)
    same = all(record[tool] == version for tool, version in tools().items())
    assert worse(before, RUNS[name].verdict(), same_tools=same) == []


def test_the_record_names_these_launches_and_hides_nothing(record: dict[str, Any]) -> None:
    assert [row["launch"] for row in record["verdicts"]] == list(RUNS)
    for row in record["verdicts"]:
        decided = row["synchronization"] == row["memory"] == "passed"
        assert decided == (row["result"] == "race_free"), row
        assert decided or row["message"], row


# Teeth.


def without(pattern: str, which: int = 0, by: str = "") -> Callable[[str], str]:
    """A fault: the match number `which` of a pattern is not there."""

    def change(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx, re.S))[which]
        return ptx[: found.start()] + found.expand(by) + ptx[found.end() :]

    return change


BARRIER, WAIT = r"bar\.sync\s+0;", r"\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:.*?DONE:\s*\}"
RACE, ORDER = "potential_race", "Conflicting accesses have no proven required ordering"
LIFE, COMPLETE = "invalid_lifecycle", "must complete before the allocation is deallocated"
# The launch, its fault, and the result and message that must come out. The first two barriers only order loads.
FAULTS: dict[str, tuple[Run, Callable[[str], str], str, str]] = {
    "no barrier behind the partial sums": (READS, without(BARRIER, 2), RACE, ORDER),
    "no barrier behind the staged records": (FOLDS, without(BARRIER, 3), RACE, ORDER),
    "no barrier behind the products": (FOLDS, without(BARRIER, 4), RACE, ORDER),
    "no wait in a row that reads": (READS, without(WAIT, 0), RACE, ORDER),
    "no wait in a row that folds": (FOLDS, without(WAIT, 1), RACE, ORDER),
    "a copy of 16 bytes less": (READS, without(r"(cp\.async\.bulk\S+ [^;]*), 16384,", 0, r"\1, 16368,"),
        "not_wellsynced", "cannot advance"),
    "no mbarrier": (READS, without(r"mbarrier\.init\S+\s+[^;]*;"), "tool_failure", "without an initializer"),
    "absent records loaded": (Run(PAIR, (3,)), without(r"@p (ld\.global\.cs\.b32)", 0, r"\1"), RACE, ORDER),
    "a key appended by every lane": (Run(PAIR, (3,)), without(r"@p (st\.global\.v2\.b32)", 0, r"\1"), RACE, ORDER),
    "gdn: no barrier behind the partial sums": (Run(DELTA, (3,)), without(BARRIER, 2), RACE, ORDER),
    "gdn: no wait in a row that reads": (Run(DELTA, (3,)), without(WAIT, 0), RACE, ORDER),
    "gdn: a key appended by every warp": (
        Run(DELTA, (3,)), without(r"@p (st\.global\.v2\.b32)", 0, r"\1"), RACE, ORDER),
    "2 tokens: no barrier behind the products, before a fold": (Run(SEVERAL, (5,)), without(BARRIER, 4), RACE, ORDER),
    "tcgen05: no barrier in front of the products": (TENSOR_READS, without(BARRIER, 2), RACE, ORDER),
    "tcgen05: no wait for the products": (TENSOR_READS, without(WAIT), LIFE, COMPLETE),
    "tcgen05: no wait for the copies": (TENSOR_READS, without(r"cp\.async\.wait_all;"), RACE, ORDER),
    "tcgen05: no wait for the stores": (DECODES, without(r"tcgen05\.wait::st[^;]*;"), LIFE, COMPLETE),
    "tcgen05: no commit": (TENSOR_READS, without(r"tcgen05\.commit[^;]*;"), "not_wellsynced", "cannot advance"),
    "tcgen05: tensor memory freed at once": (TENSOR_READS, without(BARRIER, 3), LIFE, COMPLETE),
    "gdn, 2 tokens: no barrier behind the scores": (Run(DELTA_SEVERAL, (3,)), without(BARRIER, 2), RACE, ORDER),
    "two heads a CTA: no barrier behind the scores": (replace(HEADS, counts=(3,)), without(BARRIER, 2), RACE, ORDER),
    "two heads a CTA: no barrier in front of a fold": (replace(HEADS, counts=(5,)), without(BARRIER, 3), RACE, ORDER),
}  # fmt: skip


@needs_verifier
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernel_changes_the_verdict(fault: str) -> None:
    run, change, result, message = FAULTS[fault]
    verdict = run.verdict(change)
    assert re.fullmatch(result, verdict.result), verdict
    assert message in verdict.message
    sound = {**asdict(verdict), "result": "race_free", "synchronization": "passed", "memory": "passed", "message": ""}
    assert worse(sound, verdict, same_tools=False) != []


@needs_verifier
def test_two_rows_of_one_slot_race() -> None:
    """Callers must not do this; the tool sees the race between the CTAs of a step and the threads of a commit."""
    for run in (replace(READS, counts=(3, 3)), replace(RUNS["commit, int64"], counts=(3, 3))):
        verdict = run.verdict(same_slot=True)
        assert verdict.result == RACE, verdict


@needs_verifier
def test_what_the_verifier_does_not_see() -> None:
    """Bounds, alignment and fences: a sound verdict leaves them open, the interpreter does not (`test_kernels`)."""

    def change(ptx: str) -> str:
        ptx = without(r"fence\.mbarrier_init\S*;")(ptx)
        ptx = without(r"(ld\.shared\.v4\.b32 [^;]*)\+\d+\]", 1, r"\1+8]")(ptx)
        return without(r"(ld\.shared\.v4\.b32 [^;]*)\+\d+\]", 2, r"\1+28800]")(ptx)

    assert READS.verdict(change).result == "race_free"


SOUND = {"result": "race_free", "synchronization": "passed", "memory": "passed", "message": ""}


@pytest.mark.parametrize(
    ("now", "same_tools", "count"),
    [
        (Verdict(**SOUND), True, 0),
        (Verdict(**{**SOUND, "memory": "failed"}), False, 1),
        (Verdict(**{**SOUND, "synchronization": "incomplete", "memory": "not_run"}), False, 2),
        (Verdict(**{**SOUND, "message": "other words"}), False, 0),
        (Verdict(**{**SOUND, "message": "other words"}), True, 1),
    ],
)
def test_the_comparison_sees_what_is_worse(now: Verdict, same_tools: bool, count: int) -> None:
    assert len(worse(SOUND, now, same_tools=same_tools)) == count
    assert len(worse(None, now, same_tools=same_tools)) == 1


def main() -> None:
    """Verify every launch and rewrite the record."""
    head = tools() | {
        "not_decided": {
            "equivalence": "not asked for: with given contents the tool answers unsupported, 'comparison context: "
            "expected nonnegative integer'; for a commit whose slot is a constant in its PTX, equivalence_not_proven",
            "materialize": "its synchronization passes; its memory stays incomplete, 'symbolic offsets in absolute "
            "global address may overlap under the address invariants', as its addresses come from a table; the launch "
            "behind it, which moves the cursors, is race_free",
            "probes": "not launched through the recorder",
        }
    }
    rows = [json.dumps({"launch": name, **asdict(run.verdict())}) for name, run in RUNS.items()]
    RECORD.write_text(json.dumps(head)[:-1] + ', "verdicts": [\n' + ",\n".join(rows) + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
