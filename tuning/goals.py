"""What steps of single layers are to reach on an H200, with bfloat16 activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_MODEL = "nemotron-3-super"


@dataclass(frozen=True)
class Goal:
    """What an entry is to reach: at most `us` microseconds, `ratio` times its limit; at least `speedup`."""

    us: float | None = None
    ratio: float | None = None
    speedup: float | None = None

    def met_by(self, entry: Mapping[str, Any]) -> bool:
        """Whether a measured entry reaches all of the goal."""
        return (
            (self.us is None or entry["median_us"] <= self.us)
            and (self.ratio is None or entry["ratio"] <= self.ratio)
            and (self.speedup is None or entry.get("speedup", 0.0) >= self.speedup)
        )


# H200, bf16 activations, window 16, one token: (layer, checkpoint dtype, rows, what).
GOALS: dict[tuple[str, str, int, str], Goal] = {
    (DEFAULT_MODEL, "float32", 256, "nonflush"): Goal(us=252, ratio=1.02),
    (DEFAULT_MODEL, "float32", 256, "flush"): Goal(us=560),
    (DEFAULT_MODEL, "float32", 256, "average"): Goal(us=272, speedup=2.06),
    (DEFAULT_MODEL, "bfloat16", 256, "nonflush"): Goal(us=135),
    (DEFAULT_MODEL, "float16", 256, "nonflush"): Goal(us=135),
    (DEFAULT_MODEL, "float32", 1, "nonflush"): Goal(us=6.5),
    (DEFAULT_MODEL, "float32", 8, "nonflush"): Goal(us=13.5),
    (DEFAULT_MODEL, "float32", 32, "nonflush"): Goal(us=36),
    (DEFAULT_MODEL, "bfloat16", 1, "nonflush"): Goal(us=6.2),
    (DEFAULT_MODEL, "bfloat16", 8, "nonflush"): Goal(us=10.2),
    (DEFAULT_MODEL, "bfloat16", 32, "nonflush"): Goal(us=22.5),
    (DEFAULT_MODEL, "float32", 1, "host"): Goal(us=10),
    (DEFAULT_MODEL, "bfloat16", 1, "host"): Goal(us=10),
    (DEFAULT_MODEL, "float16", 1, "host"): Goal(us=10),
    (DEFAULT_MODEL, "float32", 8, "first_call_cold"): Goal(us=1e6),
    (DEFAULT_MODEL, "float32", 8, "first_call_from_disk"): Goal(us=5e4),
    ("qwen3.5-122b-a10b", "float32", 256, "nonflush"): Goal(us=257, ratio=1.03),
    ("qwen3.5-122b-a10b", "float32", 256, "flush"): Goal(us=570),
    ("qwen3.5-122b-a10b", "float32", 256, "average"): Goal(us=277),
    ("qwen3.5-122b-a10b", "bfloat16", 256, "nonflush"): Goal(ratio=1.05),
    ("qwen3.5-122b-a10b", "float32", 1, "nonflush"): Goal(us=7),
    ("qwen3.5-122b-a10b", "float32", 32, "nonflush"): Goal(us=37),
    ("glm-5.3-flash", "float32", 256, "nonflush"): Goal(ratio=1.05),
    ("kimi-k3@tp8", "float32", 256, "nonflush"): Goal(ratio=1.08),
    ("kimi-k3@tp8", "float32", 1, "nonflush"): Goal(us=6.5),
}
# The same of steps of several tokens that read 8 records, any window: (layer, checkpoint dtype, rows, tokens).
DRAFT_GOALS: dict[tuple[str, str, int, int], Goal] = {
    **{(DEFAULT_MODEL, "float32", 256, tokens): Goal(ratio=1.12) for tokens in range(2, 17)},
    (DEFAULT_MODEL, "float32", 256, 4): Goal(us=270, ratio=1.12),
    (DEFAULT_MODEL, "float32", 256, 8): Goal(us=291, ratio=1.12),
    (DEFAULT_MODEL, "float32", 32, 8): Goal(us=44),
    (DEFAULT_MODEL, "bfloat16", 256, 8): Goal(us=165),
    ("qwen3.5-122b-a10b", "float32", 256, 4): Goal(us=275),
    ("qwen3.5-122b-a10b", "float32", 256, 8): Goal(us=300),
    ("glm-5.3-flash", "float32", 256, 8): Goal(ratio=1.12),
}
# The same of steps that read a copy beside a float32 checkpoint: (layer, copy, rows, tokens, what); the speedup at any
# window, the rest at 16.
READ_GOALS: dict[tuple[str, str, int, int, str], Goal] = {
    (DEFAULT_MODEL, "nvfp4", 256, 1, "nonflush"): Goal(us=52),
    (DEFAULT_MODEL, "float8_e4m3fn", 256, 1, "nonflush"): Goal(us=78),
    (DEFAULT_MODEL, "nvfp4", 256, 8, "nonflush"): Goal(us=79),
    (DEFAULT_MODEL, "float8_e4m3fn", 256, 8, "nonflush"): Goal(us=105),
    (DEFAULT_MODEL, "nvfp4", 8, 1, "nonflush"): Goal(us=8.6),
    (DEFAULT_MODEL, "nvfp4", 32, 1, "nonflush"): Goal(us=14),
    (DEFAULT_MODEL, "nvfp4", 256, 1, "flush"): Goal(ratio=1.05),
    (DEFAULT_MODEL, "nvfp4", 256, 1, "average"): Goal(speedup=6.5),
    ("qwen3.5-122b-a10b", "nvfp4", 256, 1, "nonflush"): Goal(ratio=1.18),
    ("qwen3.5-122b-a10b", "float8_e4m3fn", 256, 1, "nonflush"): Goal(ratio=1.12),
    ("glm-5.3-flash", "nvfp4", 256, 1, "nonflush"): Goal(ratio=1.2),
}
