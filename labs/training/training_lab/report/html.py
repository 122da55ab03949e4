"""Building blocks of the page. A plain text becomes text, whatever is in it; only what these functions made is markup.

Texts from the folder go through `foreign`: control characters are shown as escapes, and writing from right to left
turns nothing around that stands beside it. Pure.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

VOID = ("br", "hr", "meta", "link")
JOINERS = "\u200c\u200d"
"""Invisible, and part of how some scripts and emoji are written."""


class Html(str):
    """Markup. A `str` that is not one is escaped wherever it is put in."""

    __slots__ = ()


def shown(value: object, kept: str = "") -> str:
    """A text with control characters, but for `kept`, as escapes: they could hide or turn around what is near them."""
    return "".join(c if is_visible(c) or c in kept else c.encode("unicode_escape").decode("ascii") for c in str(value))


def is_visible(character: str) -> bool:
    """Whether a character is written or leaves a space, in its place."""
    return character.isprintable() or unicodedata.category(character) == "Zs" or character in JOINERS


def foreign(text: str) -> Html:
    """A text from the folder, in a line."""
    return Html(f"<bdi>{escape(shown(text))}</bdi>")


def prose(text: str) -> Html:
    """A text from the folder in which what stands between backticks is a name."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return foreign(text)
    return Html("".join(code(part) if index % 2 else foreign(part) for index, part in enumerate(parts) if part))


def block(text: str) -> Html:
    """A text of several lines from the folder, as it is."""
    return Html(f'<pre dir="auto" tabindex="0">{escape(shown(text, kept=chr(10) + chr(9)))}</pre>')


def code(text: str) -> Html:
    """A text from the folder that is a key, a hash, a path or a command."""
    return Html(f"<code><bdi>{escape(shown(text))}</bdi></code>")


def tag(name: str, *children: str | None, **attributes: Any) -> Html:
    """An element. `class_` is `class`, `aria_label` is `aria-label`; an attribute that is None is left out."""
    opening = name
    for key, value in attributes.items():
        if value is not None:
            opening += f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
    inner = join(children)
    return Html(f"<{opening}>" if name in VOID else f"<{opening}>{inner}</{name}>")


def join(children: Iterable[str | None]) -> Html:
    """Parts one after the other; None is left out."""
    return Html(
        "".join(one if isinstance(one, Html) else escape(shown(one, kept="\n")) for one in children if one is not None)
    )


def table(
    caption: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str | None]],
    numeric: Sequence[int] = (),
    is_headed: bool = True,
    is_titled: bool = True,
    class_: str | None = None,
) -> Html:
    """A table that scrolls sideways where it does not fit. `numeric` columns are set flush right; with `is_headed`
    each row begins with its heading; without `is_titled` the caption is only heard, since a heading says the same."""
    classes = [' class="n"' if index in numeric else "" for index in range(len(headings))]
    head = "".join(f'<th scope="col"{c}>{escape(text)}</th>' for c, text in zip(classes, headings, strict=True))
    lines = []
    for row in rows:
        cells = []
        for index, (cell, c) in enumerate(zip(row, classes, strict=True)):
            opening = f'<th scope="row"{c}>' if is_headed and index == 0 else f"<td{c}>"
            cells.append(opening + join([cell]))
        lines.append(f"<tr>{''.join(cells)}")
    title = tag("caption", caption, class_=None if is_titled else "unseen")
    top = f"{title}<thead><tr>{head}</tr></thead>"
    whole = Html(f"<table>{top}<tbody>{''.join(lines)}</tbody></table>")
    return tag("div", whole, class_=f"scroll {class_ or ''}".strip(), role="region", aria_label=caption, tabindex=0)


def facts(pairs: Iterable[tuple[str, str | None]], class_: str = "facts") -> Html:
    """Words and what belongs to them; those that have nothing are left out."""
    rows = [tag("div", tag("dt", word), tag("dd", said)) for word, said in pairs if said]
    return tag("dl", *rows, class_=class_) if rows else Html()


def details(summary: str, *children: str, class_: str | None = None) -> Html:
    """What is shown on demand."""
    return tag("details", tag("summary", summary), *children, class_=class_)


def paragraph(*children: str | None, class_: str | None = None) -> Html:
    """A paragraph."""
    return tag("p", *children, class_=class_)


def section(name: str, title: str, *children: str | None) -> Html:
    """A part of the page with its heading."""
    return tag("section", tag("h2", title, id=f"{name}-title"), *children, id=name, aria_labelledby=f"{name}-title")


def subsection(title: str, *children: str | None) -> Html:
    """A part of a section with its heading."""
    return tag("div", tag("h3", title), *children, class_="part")


def bar(share: float) -> Html:
    """A share as a bar; the number stands beside it."""
    percent = max(0.0, min(1.0, share)) * 100
    return Html(f'<span class="bar" aria-hidden="true"><span style="width:{percent:.2f}%"></span></span>')
