"""Directives that draw the tables of docs/performance.md as inline SVG, in the page's colours.

{share-plot} CPU         the shares of the ceiling under a heading, a dot for each case
{rival-plots}            bars for each table that has a column "Pullback"
"""

from __future__ import annotations

import re
import statistics
from html import escape
from pathlib import Path
from typing import NamedTuple

from docutils import nodes
from sphinx.util.docutils import SphinxDirective


class Table(NamedTuple):
    headings: tuple[str, ...]  # of all levels above it
    header: list[str]
    rows: list[list[str]]


def cells(line: str) -> list[str]:
    parts = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [part.strip().replace("\\|", "|") for part in parts]


def tables(path: Path) -> list[Table]:
    found: list[Table] = []
    headings: list[str] = []
    lines = iter(path.read_text(encoding="utf-8").splitlines())
    before = ""
    for line in lines:
        if heading := re.match(r"(#+) +(.*)", line):
            level = len(heading[1])
            headings = [*headings[: level - 1], heading[2]]
        elif re.fullmatch(r"\|[\s|:-]+\|", line) and before.startswith("|"):
            found.append(Table(tuple(headings), cells(before), []))
        elif line.startswith("|") and found and before.startswith("|"):
            found[-1].rows.append(cells(line))
        before = line
    return found


# ---------------------------------------------------------------- drawing

WIDTH = 760.0


def text(x: float, y: float, content: str, anchor: str = "start", kind: str = "label") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}"'
    return f"<text {place}>{escape(content)}</text>"


def bar(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{kind}"'
    return f"<rect {place}><title>{escape(title)}</title></rect>"


def dot(x: float, y: float, kind: str, title: str = "") -> str:
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="3.6" class="{kind}"'
    return f"<circle {place}><title>{escape(title)}</title></circle>"


def line(x: float, top: float, bottom: float, kind: str) -> str:
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}" class="{kind}"/>'


def picture(height: float, parts: list[str], label: str) -> nodes.raw:
    svg = (
        f'<svg class="plot" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
    return nodes.raw("", f'<div class="plot-frame">{svg}</div>', format="html")


# ---------------------------------------------------------------- shares

LEFT, RIGHT = 190.0, WIDTH - 20
FULL = 1.25  # the axis ends at this share
LANE = 15.0


class Share(NamedTuple):
    case: str
    value: float
    cell: str


def shares(table: Table, column: str) -> dict[str, list[Share]]:
    """By dtype, the smallest first."""
    found: dict[str, list[Share]] = {}
    for row in table.rows:
        named = dict(zip(table.header, row))
        cell = named.get(column, "")
        if share := re.search(r"(\d+) ?%", cell):
            lane = found.setdefault(named["dtype"], [])
            lane.append(Share(named["case"], int(share[1]) / 100, cell))
    return {dtype: sorted(found[dtype], key=lambda share: share.value) for dtype in sorted(found)}


def at(share: float) -> float:
    return LEFT + min(share, FULL) / FULL * (RIGHT - LEFT)


def lane(y: float, name: str, dtype: str, found: list[Share]) -> list[str]:
    median = statistics.median(share.value for share in found)
    title = f"{name}, {dtype}: median {median:.0%}"
    parts = [bar(LEFT, y + 1, at(median) - LEFT, LANE - 2, f"{dtype} median", title)]
    for index, share in enumerate(found):
        title = f"{name}, {share.case}, {dtype}: {share.cell}"
        parts.append(dot(at(share.value), y + LANE / 2 + (index % 3 - 1) * 3, dtype, title))
    return parts


def share_plot(path: Path, device: str) -> nodes.raw:
    parts: list[str] = []
    y, dtypes = 34.0, set()
    for table in tables(path):
        if len(table.headings) != 3 or table.headings[1] != device or "case" not in table.header:
            continue
        op = table.headings[2]
        parts.append(text(0, y + LANE / 2 + 5, op, kind="name"))
        for direction in ("forward", "backward"):
            lanes = shares(table, direction)
            if lanes:
                middle = y + len(lanes) * LANE / 2
                parts.append(text(LEFT - 10, middle + 4, direction, "end"))
            for dtype, found in lanes.items():
                parts += lane(y, f"{op} {direction}", dtype, found)
                dtypes.add(dtype)
                y += LANE
            y += 6
        y += 10
    for percent in (0, 25, 50, 75, 100, 125):
        kind = "ceiling" if percent == 100 else "grid"
        parts.insert(0, line(at(percent / 100), 26, y - 6, kind))
        parts.append(text(at(percent / 100), y + 10, f"{percent} %", "middle"))
    parts.append(text(at(1), 18, "ceiling", "middle"))
    x = LEFT
    for dtype in sorted(dtypes):
        parts += [bar(x, 7, 34, 13, f"{dtype} median"), dot(x + 17, 13.5, dtype)]
        parts.append(text(x + 40, 18, dtype))
        x += 92
    return picture(y + 18, parts, f"Shares of the ceiling on {device}")


# ---------------------------------------------------------------- rivals

BAR = 13.0


def number(cell: str, part: int) -> float | None:
    values = cell.split("/")
    found = re.search(r"\d+(\.\d+)?", values[part]) if part < len(values) else None
    return float(found[0]) if found else None


def rival_plot(table: Table, part: int, name: str) -> nodes.raw:
    columns = table.header[1:]
    values = [[number(cell, part) for cell in row[1:]] for row in table.rows]
    longest = max(value for row in values for value in row if value is not None)
    left = 175.0
    scale = (WIDTH - left - 60) / longest
    parts: list[str] = []
    x = left
    for index, column in enumerate(columns):
        kind = "ours" if column == "Pullback" else f"rival{index % 5}"
        parts.append(bar(x, 6, 12, 12, kind))
        parts.append(text(x + 17, 16, column))
        x += 40 + 7 * len(column)
    y = 30.0
    for row, numbers in zip(table.rows, values):
        given = [(i, value) for i, value in enumerate(numbers) if value is not None]
        parts.append(text(left - 10, y + BAR * len(given) / 2 + 4, row[0], "end"))
        for index, value in given:
            kind = "ours" if columns[index] == "Pullback" else f"rival{index % 5}"
            width = value * scale
            title = f"{row[0]}, {columns[index]}: {value:g}"
            parts.append(bar(left, y, width, BAR - 2, kind, title))
            parts.append(text(left + width + 5, y + 9.5, f"{value:g}", kind="value"))
            y += BAR
        y += 9
    return picture(y + 4, parts, name)


def rival_plots(path: Path) -> list[nodes.Node]:
    result: list[nodes.Node] = []
    for table in tables(path):
        if "Pullback" not in table.header[1:]:
            continue
        heading = table.headings[-1]
        rows = [[cell for cell in row[1:] if number(cell, 0) is not None] for row in table.rows]
        parts = max(cell.count("/") for row in rows for cell in row) + 1
        # A heading ends with the names of what its cells hold: "…, TFLOP/s (full / causal)".
        names = re.search(r"\(([^()]*)\)$", heading)
        labels = [label.strip() for label in names[1].split(" / ")] if names else []
        for part in range(parts):
            label = labels[part] if len(labels) == parts else f"{part + 1} of {parts}"
            base = heading[: names.start()].strip() if names and len(labels) == parts else heading
            name = base if parts == 1 else f"{base}, {label}"
            result += [nodes.rubric("", name), rival_plot(table, part, name)]
    return result


# ---------------------------------------------------------------- directives


class Plot(SphinxDirective):
    def source(self) -> Path:
        path = Path(self.env.srcdir) / "performance.md"
        self.env.note_dependency(str(path))
        return path


class SharePlot(Plot):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [share_plot(self.source(), self.arguments[0])]


class RivalPlots(Plot):
    def run(self) -> list[nodes.Node]:
        return rival_plots(self.source())


def setup(app):
    app.add_directive("share-plot", SharePlot)
    app.add_directive("rival-plots", RivalPlots)
    return {"parallel_read_safe": True}
