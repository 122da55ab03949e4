"""Numbers as people read them; a dash for one that is not known. Pure."""

from __future__ import annotations

from html import escape

from training_lab.report.html import Html

NONE = "–"
GIB, MIB, KIB = 2**30, 2**20, 2**10


def count(value: float | None) -> str:
    """A whole number."""
    return NONE if value is None else f"{value:,.0f}"


def loss(value: float | None) -> str:
    """A loss in nats."""
    return NONE if value is None else f"{value:.4f}"


def significant(value: float | None, digits: int = 4) -> str:
    """A number of any size."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def percent(share: float | None, decimals: int = 1) -> str:
    """A share."""
    return NONE if share is None else f"{share:.{decimals}%}".replace("%", " %")


def size(num_bytes: float | None) -> str:
    """Bytes, in the binary unit that suits."""
    if num_bytes is None:
        return NONE
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:,.2f} {name}" if unit == GIB else f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes:,.0f} bytes"


def duration(seconds: float | None) -> str:
    """Seconds, in the units that suit."""
    if seconds is None:
        return NONE
    if seconds < 1:
        for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
            if seconds * scale >= 1 or unit == "µs":
                return f"{seconds * scale:.3g} {unit}"
    if seconds < 100:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"


def exact(value: float | None, text: str) -> Html:
    """A number as text, with the exact one in the markup."""
    return Html(escape(text)) if value is None else Html(f'<data value="{value!r}">{escape(text)}</data>')
