"""`notes.md` as the person wrote it, with restraint: headings, lists, paragraphs, code; the rest is text. Pure."""

from __future__ import annotations

import re

from training_lab.report.html import Html, block, foreign, join, tag

HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*$")
ITEM = re.compile(r"\s{0,3}([-*+]|\d{1,9}[.)])\s+(.*)$")
FENCE = re.compile(r"\s{0,3}(```|~~~)")
FIRST_LEVEL, LAST_LEVEL = 3, 6
"""The section's own heading is of level 2."""


def set_notes(text: str) -> Html:
    """The notes as markup. No level of headings is skipped, whatever the text does."""
    lines = text.replace("\r\n", "\n").split("\n")
    parts: list[Html] = []
    level, index = FIRST_LEVEL - 1, 0
    while index < len(lines):
        line = lines[index]
        heading, item = HEADING.match(line), ITEM.match(line)
        if FENCE.match(line):
            end = next((i for i in range(index + 1, len(lines)) if FENCE.match(lines[i])), len(lines))
            parts.append(block("\n".join(lines[index + 1 : end])))
            index = end + 1
        elif heading:
            level = max(FIRST_LEVEL, min(len(heading[1]) + FIRST_LEVEL - 1, level + 1, LAST_LEVEL))
            parts.append(tag(f"h{level}", foreign(heading[2])))
            index += 1
        elif item:
            index = take_list(lines, index, parts)
        elif not line.strip():
            index += 1
        else:
            index = take_paragraph(lines, index, parts)
    return join(parts)


def take_list(lines: list[str], index: int, parts: list[Html]) -> int:
    """Adds the list that begins at a line; gives the line after it."""
    name = "ol" if lines[index].lstrip()[0].isdigit() else "ul"
    items: list[str] = []
    while index < len(lines) and lines[index].strip():
        item = ITEM.match(lines[index])
        if item:
            items.append(item[2])
        elif lines[index][0].isspace():
            items[-1] += f" {lines[index].strip()}"
        else:
            break
        index += 1
    parts.append(tag(name, *(tag("li", foreign(one), dir="auto") for one in items)))
    return index


def take_paragraph(lines: list[str], index: int, parts: list[Html]) -> int:
    """Adds the paragraph that begins at a line; gives the line after it."""
    taken = [lines[index]]
    index += 1
    while index < len(lines) and lines[index].strip() and not begins_another(lines[index]):
        taken.append(lines[index])
        index += 1
    broken = [foreign(line.strip()) for line in taken]
    parts.append(tag("p", *(part for one in broken for part in (one, Html("\n"))), dir="auto"))
    return index


def begins_another(line: str) -> bool:
    """Whether a line ends the paragraph before it."""
    return any(pattern.match(line) for pattern in (HEADING, ITEM, FENCE))
