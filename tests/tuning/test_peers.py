"""Another package's steps are given the layer's inputs, checked against the recurrence, and timed only if they agree.

The package is a module of the same names that computes the recurrence itself, right or with a fault.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from replayssm.inputs import GdnInputs, KdaInputs
from replayssm.reference import recurrence
from tuning import peers, workload
from tuning.documents import peers_table
from tuning.shapes import lookup

LAYERS = {"gdn": "qwen3.5-122b-a10b@tp8", "kda": "kimi-k3@tp8"}


def stand_in(monkeypatch: pytest.MonkeyPatch, fault: float = 0.0) -> list[dict[str, Any]]:
    """Modules in the place of fla-core's; what they were called with."""
    calls: list[dict[str, Any]] = []

    def answer(inputs: Any, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, after = recurrence.run(inputs, state)
        return out.to(torch.bfloat16), after.float() * (1 + fault)

    def gdn(q: Any, k: Any, v: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(given)
        return answer(
            GdnInputs(q, k, v, given["g"], given["beta"], given["A_log"], given["dt_bias"]), given["initial_state"]
        )

    def kda(q: Any, k: Any, v: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(given)
        bias = given["dt_bias"].view(given["g"].shape[-2:])
        inputs = KdaInputs(q, k, v, given["g"], given["beta"], given["A_log"], bias, given["lower_bound"])
        return answer(inputs, given["initial_state"])

    for name, function in (("fla.ops.gated_delta_rule", gdn), ("fla.ops.kda", kda)):
        module = ModuleType(name)
        setattr(module, "fused_recurrent_gated_delta_rule" if function is gdn else "fused_recurrent_kda", function)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def step_of(name: str) -> tuple[Any, torch.Tensor, peers.Step]:
    shape = lookup(name)
    layer = shape.layer
    inputs = workload.make_inputs(shape, 2, dtype=torch.bfloat16, device=torch.device("cpu"), num_tokens=1)
    state = torch.randn(2, layer.num_v_heads, layer.head_dim, layer.d_state)
    return inputs, state, peers.peer_step(inputs, state)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_right_step_passes_and_a_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    calls = stand_in(monkeypatch)
    inputs, state, step = step_of(LAYERS[kind])
    peers.check(inputs, state, step)
    assert calls[0]["state_v_first"] and calls[0]["output_final_state"] and calls[0]["use_gate_in_kernel"]
    stand_in(monkeypatch, fault=0.02)
    inputs, state, step = step_of(LAYERS[kind])
    with pytest.raises(peers.UncheckedError, match=r"^state: relative error 2\.0\de-02, at most 1e-02$"):
        peers.check(inputs, state, step)


def test_a_layer_that_the_peer_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="fla-core has a fused recurrent step of GDN and KDA, got Mamba2Inputs"):
        step_of("nemotron-3-super@tp8")


def test_a_machine_without_the_peer_is_told_so() -> None:
    done = CliRunner().invoke(peers.main, ["--batch", "1"])
    assert done.exit_code == 2 and "fla-core" in done.output


def test_its_table_has_both_and_how_many_times_as_long() -> None:
    entries = [
        {"model": "a", "rows": 8, "what": what, "median_us": us}
        for what, us in (("fla-core", 60.0), ("nonflush", 30.0), ("flush", 70.0))
    ]
    table = peers_table([{"entries": entries, "peers": {"fla-core": "0.6.0"}}], [])
    assert table.splitlines()[-1] == "| a | 8 | fla-core 0.6.0 | 60.0 us | 30.0 us | 2.00 | 70.0 us |"
