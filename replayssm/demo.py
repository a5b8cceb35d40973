"""The main job on real input: a hybrid model decodes English text with and without ReplaySSM, and the two are compared.

    python -m replayssm.demo [--model nemotron_h|mamba2|qwen3_next|qwen3_5|kimi_linear] [--window 16] [--tokens 48]
                             [--batch 4] [--device cpu|cuda]

The model has the layer pattern and the head sizes of a published one, fewer heads and a smaller width, and seeded
random weights: its text is noise, its arithmetic is the real one. Then it decodes speculatively, with drafts from
prompt lookup, which finds little in noise, and with drafts that are known to be right four times in five. The exit
status is 1 when the tokens differ.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import replayssm
from replayssm.cursors import make_cursors
from replayssm.inputs import GdnInputs, Inputs, KdaInputs, Mamba2Inputs
from replayssm.pool import bytes_per_slot, make_pool
from replayssm.spec import LayerSpec, ReplaySpec

# Herman Melville, Moby-Dick (1851), chapter 1; in the public domain.
TEXT = (
    "Call me Ishmael. Some years ago--never mind how long precisely--having little or no money in my purse, and "
    "nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of the "
    "world. It is a way I have of driving off the spleen and regulating the circulation."
)
PAD = 256  # one past the 256 byte values that are the vocabulary

NANO_30B_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
KIMI_LINEAR_ATTENTION = (4, 8, 12, 16, 20, 24, 27)  # of 27 layers, counted from 1; the others are Kimi Delta Attention
SUPER_LAYER = LayerSpec("mamba2", num_v_heads=128, num_k_heads=8, head_dim=64, d_state=128)
# A letter of the pattern, a name, and the layer of a published model whose kernel is timed.
RECURRENCES: dict[str, tuple[str, str, str, LayerSpec]] = {
    "mamba2": ("M", "Mamba-2", "Nemotron-3-Super layer (128 heads, 64 x 128, 8 groups)", SUPER_LAYER),
    "gdn": (
        "G",
        "Gated DeltaNet",
        "Qwen3.5-122B-A10B layer (64 value heads, 16 key heads, 128 x 128)",
        LayerSpec("gdn", num_v_heads=64, num_k_heads=16, head_dim=128, d_state=128),
    ),
    "kda": (
        "K",
        "Kimi Delta Attention",
        "Kimi-Linear-48B-A3B layer (32 heads, 128 x 128)",
        LayerSpec("kda", num_v_heads=32, num_k_heads=32, head_dim=128, d_state=128),
    ),
}

COMMON: dict[str, Any] = {
    "vocab_size": PAD + 1, "hidden_size": 128, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None,
    "initializer_range": 0.2,
}  # fmt: skip
MAMBA2: dict[str, Any] = {**COMMON, "n_groups": 2, "chunk_size": 16, "time_step_min": 0.01, "time_step_max": 1.0}
HYBRID: dict[str, Any] = {
    **COMMON, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128,
}  # fmt: skip
QWEN: dict[str, Any] = {
    **HYBRID, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # fmt: skip
# The prefix of its classes and its configuration: layer pattern and head sizes of a published model, the rest small.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": ("NemotronH", {
        **MAMBA2, **HYBRID, "hybrid_override_pattern": NANO_30B_PATTERN, "mamba_num_heads": 8, "mamba_head_dim": 64,
        "ssm_state_size": 128, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
    }),
    "mamba2": ("Mamba2", {**MAMBA2, "num_heads": 4, "head_dim": 64, "state_size": 128, "num_hidden_layers": 16}),
    "qwen3_next": ("Qwen3Next", {
        **QWEN, "num_hidden_layers": 48, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }),
    "qwen3_5": ("Qwen3_5", {**QWEN, "num_hidden_layers": 32}),
    "kimi_linear": ("KimiLinear", {
        **HYBRID, "linear_num_heads": 2, "linear_head_dim": 128, "num_hidden_layers": 27,
        "linear_attn_config": {
            "full_attn_layers": KIMI_LINEAR_ATTENTION,
            "kda_layers": [layer for layer in range(1, 28) if layer not in KIMI_LINEAR_ATTENTION],
        },
        "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
        "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    }),
}  # fmt: skip


class Decoded(NamedTuple):
    """What one run of `generate` gave: tokens [batch, N], logits [N, batch, vocabulary], decoded tokens a second."""

    tokens: Tensor
    logits: Tensor
    rate: float


def build_model(kind: str, device: torch.device) -> Any:
    """A seeded random fp32 model of a kind of `MODELS`."""
    import transformers

    transformers.logging.set_verbosity_error()
    prefix, fields = MODELS[kind]
    torch.manual_seed(0)
    config: Any = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    model: Any = getattr(transformers, f"{prefix}ForCausalLM")(config(**fields))
    for name, parameter in model.named_parameters():
        if name.endswith("linear_attn.A_log"):  # of Qwen: drawn so large that a state forgets within a token
            torch.nn.init.uniform_(parameter, -4.6, 0.0)
    return model.eval().to(device)


def layer_pattern(model: Any) -> str:
    """One letter for each layer of a model: M, G or K a recurrence of ours, E experts, * attention."""
    from replayssm.integrations.transformers import layer_specs

    config, ours = model.config, RECURRENCES[layer_specs(model)[0].recurrence][0]
    kinds = getattr(config, "layer_types", None) or ["linear_attention"] * config.num_hidden_layers
    return getattr(config, "hybrid_override_pattern", "".join(ours if "linear" in kind else "*" for kind in kinds))


def encode(text: str, batch: int, device: torch.device) -> dict[str, Tensor]:
    """Cut a text into `batch` prompts of unequal length and encode each by its UTF-8 bytes, padded on the left."""
    data = text.encode()
    cuts = [len(data) * row // batch for row in range(batch + 1)]
    parts = enumerate(itertools.pairwise(cuts))
    prompts = [data[start : end - min(5 * row, (end - start) // 2)] for row, (start, end) in parts]
    width = max(map(len, prompts))
    ids = torch.full((batch, width), PAD)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
    return {"input_ids": ids.to(device), "attention_mask": (ids != PAD).long().to(device)}


class Progress:
    """A streamer of transformers that prints how far decoding is, and notes when it started and ended."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.times = label, total, list[float]()

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        done = len(self.times) - 1  # the first call brings the prompt
        if done == 1:
            print(f"  {self.label:<10} prompt read", flush=True)
        elif done and (done % 16 == 0 or done == self.total):
            print(f"  {self.label:<10} {done:>4} of {self.total} tokens", flush=True)

    def end(self) -> None:
        pass

    def rate(self, batch: int) -> float:
        return batch * (self.total - 1) / (self.times[-1] - self.times[1])


def decode(model: Any, prompts: dict[str, Tensor], tokens: int, label: str) -> Decoded:
    """Decode greedily with `model.generate`, after a short run that warms up."""
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    model.generate(**{name: ids[:, -4:] for name, ids in prompts.items()}, **options, max_new_tokens=2)
    progress = Progress(label, tokens)
    result = model.generate(**prompts, **options, max_new_tokens=tokens, streamer=progress)
    batch, width = prompts["input_ids"].shape
    return Decoded(result.sequences[:, width:], torch.stack(result.logits), progress.rate(batch))


def state_traffic(layer: LayerSpec, replay: ReplaySpec) -> dict[str, tuple[float, float]]:
    """Bytes of state that a layer must read and write a token and sequence, plain and with ReplaySSM.

    With S the bytes of a state, r those of a record and L the window: plain reads S and writes S; ReplaySSM reads S
    and the live records, (L + 1) / 2 on average, and writes one record each step and S once in L steps.
    """
    sizes = bytes_per_slot(layer, replay)
    state, window = sizes["checkpoint"], replay.window
    record = sum(size for name, size in sizes.items() if name != "checkpoint") / replay.ring_capacity
    return {
        "plain": (state, state),
        "ReplaySSM": (state + record * (window + 1) / 2, record + state / window),
    }


def known_drafts(texts: list[list[int]], *, right: float = 0.8) -> Callable[[list[int], int], list[int]]:
    """Drafts for `generate_speculative` from rows that were decoded before, each token right with a probability."""
    draw = random.Random(0).random

    def propose(tokens: list[int], num_draft: int) -> list[int]:
        text = next((text for text in texts if text[: len(tokens)] == tokens), [])
        draft = text[len(tokens) : len(tokens) + num_draft]
        return [token if draw() < right else (token + 1) % PAD for token in draft]

    return propose


def report_speculation(model: Any, prompts: dict[str, Tensor], expected: Tensor, *, window: int) -> bool:
    """Decode with drafts and print what they saved; whether the tokens are those `expected`, [batch, N]."""
    from replayssm.integrations.transformers import disable, enable, generate_speculative, prompt_lookup

    num_draft, few, many = min(4, window - 1), min(8, expected.shape[1]), min(24, expected.shape[1])
    print(f"\nSpeculative decoding, {num_draft} drafts a row verified in one forward:")
    if num_draft < 1:
        print("  not run: a window of 1 has no room for drafts")
        return True
    ids, mask = prompts["input_ids"], prompts["attention_mask"].bool()
    texts = [[*row[live].tolist(), *new.tolist()] for row, live, new in zip(ids, mask, expected, strict=True)]
    same = True
    enable(model, window=window, max_draft=1 + num_draft)
    try:
        for label, tokens, propose in (
            ("prompt lookup", few, prompt_lookup),
            ("tokens of the plain run, one in five spoiled", many, known_drafts(texts)),
        ):
            sequences, saved = generate_speculative(
                model, ids, attention_mask=mask, max_new_tokens=tokens, num_draft=num_draft, propose=propose
            )
            equal = torch.equal(sequences[:, ids.shape[1] :], expected[:, :tokens])
            print(
                f"  {label}: identical tokens {'yes' if equal else 'NO'}; {saved.mean_accepted:.2f} tokens a row and "
                f"forward; {saved.steps} forwards for {tokens} tokens, {saved.steps_saved} saved",
                flush=True,
            )
            same &= equal
    except NotImplementedError as limit:
        print(f"  not run: {limit}")
    finally:
        disable(model)
    return same


def report_traffic(model: Any, replay: ReplaySpec) -> None:
    """Print what all layers of a recurrence must move for a token of one sequence, plain and with ReplaySSM."""
    from replayssm.integrations.transformers import layer_specs

    layers = layer_specs(model)
    name = RECURRENCES[layers[0].recurrence][1]
    print(f"\nState bytes a token and sequence, {len(layers)} {name} layers (from the formula, not measured):")
    totals = {}
    for name in ("plain", "ReplaySSM"):
        read, write = (sum(state_traffic(layer, replay)[name][way] for layer in layers) for way in (0, 1))
        totals[name] = read + write
        print(f"  {name:<10} read {read / 2**20:7.3f} MiB   written {write / 2**20:7.3f} MiB")
    print(f"  ReplaySSM moves {totals['plain'] / totals['ReplaySSM']:.2f} times fewer bytes")


def median_us(run: Callable[[], object], *, calls: int = 10, repeats: int = 20) -> float:
    """Median time of one call in microseconds, from CUDA graphs of `calls` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def random_inputs(layer: LayerSpec, rows: int, device: torch.device) -> Inputs:
    """Inputs of a step of one token a row, in bfloat16 with float32 parameters."""

    def draw(*sizes: int) -> Tensor:
        return torch.randn(rows, 1, *sizes, device=device).bfloat16()

    heads, channels = layer.num_v_heads, (layer.d_state,) if layer.decays_per_channel else ()
    value, query, key = draw(heads, layer.head_dim), *(draw(layer.num_k_heads, layer.d_state) for _ in "qk")
    decay, strength = draw(heads, *channels), draw(heads)
    rate, bias = torch.rand(heads, device=device), torch.randn(heads, *channels, device=device)
    if layer.recurrence == "mamba2":
        return Mamba2Inputs(value, decay, key, query, -rate, D=rate, dt_bias=bias, dt_softplus=True)
    if layer.recurrence == "gdn":
        return GdnInputs(query, key, value, decay, strength, rate, bias)
    return KdaInputs(query, key, value, decay, strength, rate, bias)


def report_kernel(device: torch.device, *, recurrence: str = "mamba2", rows: int = 256, live: int = 8) -> None:
    """Time `replayssm.step` on one layer of a published model against the time that reading its bytes takes."""
    _, _, title, layer = RECURRENCES[recurrence]
    replay = ReplaySpec(window=16, activation_dtype=torch.bfloat16)
    print(f"\nOne {title}, batch {rows}, fp32 state, bf16 activations:")
    if device.type != "cuda":
        print("  kernel times and the read limit: not measured, no GPU is used")
        return
    inputs = random_inputs(layer, rows, device)
    pool, cursors = make_pool(layer, replay, rows, device=device), make_cursors(replay, rows, device=device)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    out = torch.empty(rows, 1, layer.num_v_heads, layer.head_dim, dtype=torch.bfloat16, device=device)

    probe = torch.empty(2**29, device=device).normal_()
    bandwidth = probe.nbytes / median_us(lambda: torch.amax(probe))  # bytes a microsecond
    sizes = bytes_per_slot(layer, replay)
    record = (sum(sizes.values()) - sizes["checkpoint"]) / replay.ring_capacity
    tokens = [tensor for tensor in (out, *inputs) if isinstance(tensor, Tensor) and tensor.dim() > 2]
    needed = rows * (sizes["checkpoint"] + (live + 1) * record) + sum(tensor.nbytes for tensor in tokens)
    for label, count in ((f"{live} live records", live), ("all rows folding", replay.window)):
        cursors.num_committed.fill_(count)
        took = median_us(lambda: replayssm.step(pool, cursors, inputs, cache_indices=slots, out=out))
        print(f"  {label:<18} {took:7.1f} us")
    print(
        f"  limit at {live} live    {needed / bandwidth:7.1f} us at {bandwidth / 1e6:.2f} TB/s, what torch.amax reads"
    )
    print("  a quick look in this process; python -m tuning bench follows the full protocol")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; exits with a message when a number is out of range."""
    parser = argparse.ArgumentParser(prog="python -m replayssm.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="nemotron_h")
    parser.add_argument("--window", type=int, default=16, help="records kept before a fold, 1 to 64")
    parser.add_argument("--tokens", type=int, default=48, help="tokens decoded for each prompt, 2 or more")
    parser.add_argument("--batch", type=int, default=4, help="prompts, 1 to 16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    if options.tokens < 2 or not 1 <= options.batch <= 16:
        parser.error(f"expected --tokens of 2 or more and --batch of 1 to 16, got {options.tokens}, {options.batch}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison and print it; the exit status is 1 when the decoded tokens differ."""
    options = parse_arguments(arguments)
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if device.type == "cpu":
        # The tensors are small: a second thread gains nothing, and where its core is busy the first one waits for it.
        torch.set_num_threads(1)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, 1 thread"
    print(f"ReplaySSM demo: {options.model}, window {options.window}, on {where}; loading transformers", flush=True)
    from replayssm.integrations.transformers import disable, enable, layer_specs

    model = build_model(options.model, device)
    prompts = encode(TEXT, options.batch, device)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    lengths = prompts["attention_mask"].sum(1).tolist()
    layer = layer_specs(model)[0]
    print(f"Model: {layer_pattern(model)}\n  {parameters:.1f} M seeded random fp32 weights, {layer}")
    print(f"Input: Moby-Dick, byte by byte, prompts of {lengths} bytes padded on the left; greedy decoding", flush=True)

    plain = decode(model, prompts, options.tokens, "plain")
    enable(model, window=options.window)
    try:
        replayed = decode(model, prompts, options.tokens, "ReplaySSM")
    finally:
        disable(model)

    same = torch.equal(plain.tokens, replayed.tokens)
    difference = (plain.logits - replayed.logits).abs().max().item()
    print(f"\nDecoded tokens identical (fp32): {'yes' if same else 'NO'}, {plain.tokens.numel()} compared")
    print(f"Largest logit difference: {difference:.2e}, of logits up to {plain.logits.abs().max().item():.1f}")
    print(f"First row, noise from random weights: {bytes(t for t in replayed.tokens[0].tolist() if t < PAD)!r}")
    same &= report_speculation(model, prompts, plain.tokens, window=options.window)
    report_traffic(model, ReplaySpec(options.window, activation_dtype=torch.float32))
    print(f"\nTokens a second, measured: plain {plain.rate:.1f}, ReplaySSM {replayed.rate:.1f}")
    if device.type != "cuda":
        print("  On a CPU ReplaySSM runs its torch twin: a reference for the kernels, not a fast path.")
    report_kernel(device, recurrence=layer.recurrence)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
