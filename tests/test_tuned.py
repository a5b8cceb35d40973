"""A tuned table says how a step is launched only where it is whole, of this device, and first in the order of sources.

Every source is tried against those below it, every damage to a file once as the file that the environment names (an
error) and once as the user's own (a warning, once, and the next source). The shape is Nemotron-3-Super's, whose
heuristic is one CTA a head; tables ask for 2 or 4, so a plan shows which of them it follows.
"""

from __future__ import annotations

import json
import timeit
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.configs import KdaOptions, Mamba2Options, RowOptions, StepConfig
from replayssm import LayerSpec, Plan, ReplaySpec, plan, plan_step, tuned
from replayssm.spec import ReadDtype
from replayssm.tuned import Choice, Shape, Table, TunedTableError, bucket, read_table
from tests.helpers.scripted import tabled

LAYER, REPLAY = LayerSpec("mamba2", 128, 8, 64, 128), ReplaySpec()
H200 = "NVIDIA H200"
Home = Callable[..., Path]
LAUNCH = StepConfig(fold_values=32)


def choice(split: int, us: float = 10.0) -> Choice:
    return Choice(tabled(replace(LAUNCH, split=split)), us, us - 1, us + 1)


def table(split: int = 2, *, batches: tuple[int, ...] = (8,), **facts: Any) -> Table:
    entries = {Shape.of(LAYER, REPLAY, 1): {batch: choice(split) for batch in batches}}
    made = Table(H200, "sm_90a", "measured", {"cutlass_dsl": "4.8.1"}, "scripted", entries)
    return replace(made, **facts)


def write(path: Path, content: Table | dict[str, Any] | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.to_json() if isinstance(content, Table) else content
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Folders of this test's own, no device, and nothing read before or kept behind."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(tuned, "local_device", lambda arch: None)
    caches = (tuned.tables, plan._planned)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def home(forget: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Home:
    """Writes the table of a source: "shipped", "user", or "named" by the environment."""

    def put(source: str, content: Table | dict[str, Any] | str, name: str = "a.json") -> Path:
        if source == "shipped":
            return write(tmp_path / "shipped" / name, content)
        if source == "user":
            return write(tuned.user_path(), content)
        monkeypatch.setenv(tuned.ENVIRONMENT, str(tmp_path / "named.json"))
        return write(tuned.user_path(), content)

    return put


def planned(batch: int = 8, replay: ReplaySpec = REPLAY, **more: Any) -> Plan:
    return plan_step(LAYER, replay, Mamba2Options(), **({"arch": "sm_90a", "batch": batch} | more))


def test_the_order_of_sources(home: Home) -> None:
    """Each new source is above those before it."""
    seen = []
    for source, split in (("none", 1), ("shipped", 2), ("user", 4), ("named", 2)):
        if source != "none":
            home(source, table(split))
        tuned.tables.cache_clear()
        plan._planned.cache_clear()
        made = planned()
        assert made.key.config.split == split
        seen.append(made.source)
    assert seen == ["heuristic", "shipped", "user", "user"]
    explicit = planned(config=StepConfig(split=1))
    assert (explicit.source, explicit.key.config.split) == ("explicit", 1)


def test_a_plan_has_every_launch_parameter_of_the_table(home: Home) -> None:
    """All differ from the heuristic's, but for the heads of a CTA: without a copy there is one."""
    entry = StepConfig(split=2, warps=8, ctas=3, fold_values=8)
    home("user", table(entries={Shape.of(LAYER, REPLAY, 1): {8: Choice(tabled(entry), 10.0)}}))
    made = planned()
    assert tabled(made.key.config) == tabled(entry)
    tuned.tables.cache_clear()
    plan._planned.cache_clear()
    tuned.user_path().unlink()
    others = tabled(planned().key.config)
    assert [name for name, value in tabled(entry).items() if value == others[name]] == ["heads"]


def test_a_source_without_the_shape_leaves_it_to_the_next(home: Home) -> None:
    home("shipped", table(2))
    home("user", table(4, entries={}))
    assert planned().source == "shipped"


@pytest.mark.parametrize("predicted", ["shipped", "user"])
def test_measured_before_predicted(predicted: str, home: Home) -> None:
    """Wherever the predicted table lies, and only where a measured one has the shape."""
    home(predicted, table(4, basis="predicted"), "a.json")
    home("shipped", table(2), "b.json")
    assert (planned().source, planned().key.config.split) == ("shipped", 2)
    home("shipped", table(2, entries={}), "b.json")
    tuned.tables.cache_clear()
    plan._planned.cache_clear()
    assert (planned().source, planned().key.config.split) == ("predicted", 4)


def test_autotuned_before_predicted(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "_kept", {})
    home("shipped", table(4, basis="predicted"))
    assert planned().source == "predicted"
    tuned.keep(Shape.of(LAYER, REPLAY, 1), 8, "sm_90a", choice(2))
    plan.forget()
    assert (planned().source, planned().key.config.split) == ("autotuned", 2)


def test_a_predicted_table_holds_for_the_architecture(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "local_device", lambda arch: "NVIDIA of another name")
    home("shipped", table(4), "a.json")
    assert planned().source == "heuristic"
    home("shipped", table(4, basis="predicted"), "a.json")
    tuned.tables.cache_clear()
    plan._planned.cache_clear()
    assert planned().source == "predicted"


def test_precision_is_the_heuristics(home: Home) -> None:
    """A table has none, and one that does is refused: how exact a product is, is not for a clock to decide."""
    heuristic = planned(num_tokens=4, replay=ReplaySpec(max_draft=4))
    home("user", table(entries={Shape.of(LAYER, REPLAY, 4): {8: choice(2)}}))
    tuned.tables.cache_clear()
    plan._planned.cache_clear()
    made = planned(num_tokens=4, replay=ReplaySpec(max_draft=4))
    assert (made.source, made.key.config.split) == ("user", 2)
    assert made.key.config.precision == heuristic.key.config.precision == "tf32"
    data = table().to_json()
    data["entries"][0]["batches"]["8"]["parameters"]["precision"] = "bf16"
    with pytest.raises(TunedTableError, match="'fold_values'"):
        read_table(home("named", data))


@pytest.mark.parametrize(
    ("batch", "nearest"), [(1, 1), (2, 8), (8, 8), (9, 32), (31, 32), (32, 32), (33, 32), (4096, 32)]
)
def test_the_nearest_batch(batch: int, nearest: int) -> None:
    """The smallest that is not below, else the largest."""
    hit = table(batches=(1, 8, 32)).find(Shape.of(LAYER, REPLAY, 1), bucket(batch))
    assert hit is not None
    assert hit[0] == nearest


def test_batches_share_plans_by_powers_of_two(home: Home) -> None:
    assert [bucket(batch) for batch in (0, 1, 2, 3, 4, 5, 255, 256, 257, 65535, 10**6)] == [
        1, 1, 2, 4, 4, 8, 256, 256, 512, 65536, 65536,
    ]  # fmt: skip
    entry = {1: choice(4), 8: choice(2), 32: choice(1)}
    home("shipped", table(entries={Shape.of(LAYER, REPLAY, 1): entry}))
    plans = [planned(batch) for batch in range(1, 257)]
    assert len({id(made) for made in plans}) == 9
    assert [plans[batch - 1].key.config.split for batch in (1, 2, 8, 9, 256)] == [4, 2, 2, 1, 1]


@pytest.mark.parametrize(
    "other",
    [
        {"replay": ReplaySpec(window=8)},
        {"replay": ReplaySpec(checkpoint_dtype=torch.bfloat16)},
        {"replay": ReplaySpec(activation_dtype=torch.float16)},
        {"replay": ReplaySpec(value_dtype=torch.float32)},
        {"replay": ReplaySpec(read_dtype="nvfp4")},
        {"num_tokens": 0},
        {"replay": ReplaySpec(max_draft=2), "num_tokens": 2},
        {"rows": RowOptions(has_cu_seqlens=True)},
    ],
)
def test_another_step_is_not_served(home: Home, other: dict[str, Any]) -> None:
    home("shipped", table())
    assert planned().source == "shipped"
    assert planned(**other).source == "heuristic"


@pytest.mark.parametrize("read", ["nvfp4", torch.float8_e4m3fn], ids=str)
def test_a_step_that_reads_a_copy_has_entries_of_its_own(home: Home, read: ReadDtype) -> None:
    reads = ReplaySpec(read_dtype=read)
    home("shipped", table(entries={Shape.of(LAYER, reads, 1): {8: choice(4)}}))
    assert planned(replay=reads).source == "shipped" and planned(replay=reads).key.config.split == 4
    assert planned().source == "heuristic"
    assert planned(replay=ReplaySpec(read_dtype="mxfp8")).source == "heuristic"


def test_what_no_launch_parameter_depends_on_is_no_part_of_a_shape(home: Home) -> None:
    home("shipped", table())
    other = ReplaySpec(max_draft=4, ring_capacity=64, value_dtype=torch.bfloat16)
    assert planned(replay=other, rows=RowOptions("int64", pdl=True), ring_layout="strided").source == "shipped"


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = table(batches=(1, 8))
    runner_up = replace(choice(4), runner_up=tabled(StepConfig()), runner_up_us=11.5)
    made = replace(made, entries={**made.entries, Shape.of(LAYER, REPLAY, 4): {2: runner_up}})
    assert read_table(write(tmp_path / "t.json", made)) == made


def _damage(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = table().to_json()
    change(data)
    return data


def _parameters(data: dict[str, Any]) -> dict[str, Any]:
    return data["entries"][0]["batches"]["8"]["parameters"]


WHOLE = json.dumps(table().to_json())
DAMAGED: list[tuple[str, str | dict[str, Any], str]] = [
    ("half-written", WHOLE[: len(WHOLE) // 2], "expected JSON, got .*; remove it, or tune again"),
    ("no object", "[1]", "schema None"),
    ("schema", _damage(lambda d: d.update(schema=1)), "expected a table of schema 2, got schema 1"),
    ("no device", _damage(lambda d: d.pop("device")), "no 'device'"),
    ("arch", _damage(lambda d: d.update(arch="sm_80")), "header: no 'sm_80'"),
    ("basis", _damage(lambda d: d.update(basis="guessed")), "one of .'measured', 'predicted'.*'guessed'"),
    ("layer", _damage(lambda d: d["entries"][0]["layer"].update(num_v_heads=3)), "entry 0.*multiple of num_k_heads"),
    ("dtype", _damage(lambda d: d["entries"][0]["replay"].update(decay_dtype="float8")), "entry 0.*float8"),
    ("twice", _damage(lambda d: d["entries"].append(d["entries"][0])), "entry 1.*got a second"),
    ("batch", _damage(lambda d: d["entries"][0].update(batches={"12": {}})), "a power of two.*got 12"),
    ("split", _damage(lambda d: _parameters(d).update(split=3)), "entry 0.*128.*batch 8.*split: 64 rows"),
    ("warps", _damage(lambda d: _parameters(d).update(warps=2)), "batch 8.*warps: supported are 4, 8, got 2"),
    ("of other fields", _damage(lambda d: _parameters(d).pop("ctas")), "batch 8.*expected .*'ctas'.* as ints"),
    ("zero", _damage(lambda d: _parameters(d).update(split=0)), "batch 8.*ints of 1 or more"),
    ("other device", table(device="NVIDIA H100").to_json(), "a table for NVIDIA H200, got one for NVIDIA H100"),
    ("other arch", table(arch="sm_103a").to_json(), "a table for sm_90a, got one for sm_103a"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), [one[1:] for one in DAMAGED], ids=[one[0] for one in DAMAGED])
def test_a_file_that_cannot_be_used(home: Home, monkeypatch, content: str | dict[str, Any], message: str) -> None:
    monkeypatch.setattr(tuned, "local_device", lambda arch: H200)
    home("shipped", table())
    path = home("user", content)
    with pytest.warns(RuntimeWarning, match=message) as caught:
        assert planned(8).source == "shipped"
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned(64).source == "shipped"  # said once
    tuned.tables.cache_clear()
    named = home("named", content)
    for batch in (16, 16):  # and never forgotten
        with pytest.raises(TunedTableError, match=message) as error:
            planned(batch)
    assert str(named) in str(error.value)


def test_a_named_file_that_is_not_there(home: Home, monkeypatch) -> None:
    home("named", table()).unlink()
    with pytest.raises(TunedTableError, match=r"named\.json: expected a file that can be read, got No such file"):
        planned()
    assert planned(config=StepConfig()).source == "explicit"  # which reads no table


def test_shipped_tables_of_other_devices_are_left_alone(home: Home, monkeypatch) -> None:
    monkeypatch.setattr(tuned, "local_device", lambda arch: "NVIDIA H100 80GB HBM3")
    home("shipped", table())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned().source == "heuristic"


def test_a_cached_plan_reads_no_file_and_takes_two_microseconds(home: Home, monkeypatch) -> None:
    """Held to 10 us where other processes share the cores; the time is that of the best of many short runs."""
    home("shipped", table())
    made = planned()
    monkeypatch.setattr(tuned, "find", None)
    options, calls = Mamba2Options(), 1000
    again = lambda: plan_step(LAYER, REPLAY, options, arch="sm_90a", batch=8)  # noqa: E731
    assert again() is made
    assert min(timeit.repeat(again, number=calls, repeat=20)) / calls < 10e-6


def test_what_is_shipped_is_valid_and_packaged(repository: Path) -> None:
    assert 'replayssm = ["py.typed", "data/tuned/*.json"]' in (repository / "pyproject.toml").read_text()
    paths = sorted((repository / "replayssm/data/tuned").glob("*.json"))
    assert paths and all(read_table(path).entries for path in paths)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_the_local_device_counts_for_its_own_architecture(monkeypatch, arch: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: H200)
    assert tuned.local_device(arch) == (H200 if arch == "sm_90a" else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert tuned.local_device(arch) is None


def test_the_options_of_a_layer_do_not_matter(home: Home) -> None:
    layer = LayerSpec("kda", 12, 12, 128, 128)
    home("shipped", table(entries={Shape.of(layer, REPLAY, 1): {8: choice(2)}}))
    for options in (KdaOptions(0.5), KdaOptions(1.0, lower_bound=-5.0)):
        assert plan_step(layer, REPLAY, options, arch="sm_90a", batch=3).source == "shipped"
