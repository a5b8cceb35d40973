"""What the interpreter raises: a fault inside an instruction, and the same with its line, CTA, warp and lane."""

from __future__ import annotations

from typing import Any

MAX_TEXT = 240


class FaultError(Exception):
    """Trouble that does not know where it is yet.

    Args:
        kind: short name, e.g. "out_of_bounds".
        detail: what is wrong, with numbers.
        index: which of the active lanes, counted among those; None where all are meant.
    """

    def __init__(self, kind: str, detail: str, index: int | None = None) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail, self.index = kind, detail, index


def fault_if(wrong: Any, kind: str, detail: str, index: int | None = None) -> None:
    if wrong:
        raise FaultError(kind, detail, index)


class TroubleError(Exception):
    """A kernel is wrong, or does what is not modelled (kind "unmodelled").

    Args:
        kind, detail: as for `FaultError`.
        line, text: number and text of the PTX line; 0 and empty where the launch as a whole is meant.
        cta, warp, lane: where it happened, as far as it is known.
    """

    def __init__(self, kind: str, detail: str, *, line: int = 0, text: str = "", **where: Any) -> None:
        self.kind, self.detail, self.line, self.text = kind, detail, line, text.strip()[:MAX_TEXT]
        self.cta, self.warp, self.lane = (where.get(name) for name in ("cta", "warp", "lane"))
        known = (("CTA", self.cta), ("warp", self.warp), ("lane", self.lane))
        place = ", ".join(f"{name} {value}" for name, value in known if value is not None)
        at = f"\n  line {line}: {self.text}" if line else ""
        super().__init__(f"{kind}: {detail}{f' ({place})' if place else ''}{at}")
