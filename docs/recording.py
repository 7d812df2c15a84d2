"""A session at a terminal as an SVG picture: a frame for each moment, animated by CSS.

Without animation, and for readers who prefer reduced motion, it is the last frame. The bar is drawn, not
written: fonts have its characters in other widths. tests/check/docs/test_recording.py records and compares.
"""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

#: Size of a character in pixels, and the margin around the screen.
WIDTH, HEIGHT, MARGIN = 10, 24, 20
#: The width of the picture where there is room, in pixels.
SHOWN = 440
#: The animation runs so many times, and its last frame stays.
ROUNDS = 2
TEXT, COMMAND, BACKGROUND = "#d4d4d8", "#86efac", "#18181b"
BAR = {"█": "#93c5fd", "░": "#3f3f46"}
PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{shown}" viewBox="0 0 {width} {height}">
<style>
text {{ font: 16.6px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }}
text {{ fill: {text}; white-space: pre }}
.command {{ fill: {command} }}
g {{ visibility: hidden }}
g:last-of-type {{ visibility: visible }}
@media (prefers-reduced-motion: no-preference) {{
g {{ animation: {seconds:g}s step-end {rounds} }}
{animations}
}}
</style>
<rect width="{width}" height="{height}" rx="10" fill="{border}"/>
<rect x="1" y="1" width="{inner_width}" height="{inner_height}" rx="9" fill="{background}"/>
{frames}
</svg>
"""


class Frame(NamedTuple):
    """The lines of a screen, which may be longer than it is wide, and how many seconds they are shown."""

    lines: Sequence[str]
    seconds: float


def picture(frames: Sequence[Frame], columns: int) -> str:
    """Return the frames as an animated SVG of a terminal of so many columns."""
    rows = max(sum(1 for line in frame.lines for _ in wrapped(line, columns)) for frame in frames)
    width, height = columns * WIDTH + 2 * MARGIN, rows * HEIGHT + 2 * MARGIN
    total = sum(frame.seconds for frame in frames)
    ends = list(itertools.accumulate(frame.seconds for frame in frames))
    return PICTURE.format(
        shown=SHOWN,
        width=width,
        height=height,
        inner_width=width - 2,
        inner_height=height - 2,
        border=BAR["░"],
        text=TEXT,
        command=COMMAND,
        background=BACKGROUND,
        seconds=total,
        rounds=ROUNDS,
        animations="\n".join(
            _animation(number, 100 * (end - frame.seconds) / total, 100 * end / total)
            for number, (frame, end) in enumerate(zip(frames, ends, strict=True))
        ),
        frames="\n".join(_group(number, frame, columns) for number, frame in enumerate(frames)),
    )


def screens(svg: str) -> list[list[str]]:
    """Return the lines of each frame of a picture."""
    groups = re.findall(r"<g .*?>\n(.*?)</g>", svg, re.DOTALL)
    return [
        [
            "".join(map(html.unescape, re.findall(r"<tspan.*?>(.*?)</tspan>", line)))
            for line in group.splitlines()
        ]
        for group in groups
    ]


def wrapped(line: str, columns: int) -> Iterator[str]:
    """Yield the rows of a line in a terminal, which wraps it anywhere."""
    yield line[:columns]
    yield from (line[at : at + columns] for at in range(columns, len(line), columns))


def _animation(number: int, start: float, end: float) -> str:
    hidden = "0% { visibility: hidden } " if number else ""
    after = f" {end:.2f}% {{ visibility: hidden }}" if end < 100 else ""
    steps = f"{hidden}{start:.2f}% {{ visibility: visible }}{after}"
    return f"#f{number} {{ animation-name: f{number} }} @keyframes f{number} {{ {steps} }}"


def _group(number: int, frame: Frame, columns: int) -> str:
    lines, row = [], 0
    for line in frame.lines:
        spans, shapes = [], ""
        for part in wrapped(line, columns):
            y = MARGIN + row * HEIGHT
            row += 1
            for run in re.finditer("█+|░+", part):
                x, width = MARGIN + run.start() * WIDTH, len(run[0]) * WIDTH
                shapes += f'<rect x="{x}" y="{y + 4}" width="{width}" height="16" fill="{BAR[run[0][0]]}"/>'
            spans += _spans(part, y + 18)
        kind = ' class="command"' if line.startswith(("$ ", "> ")) else ""
        lines.append(f"<text{kind}>{''.join(spans)}</text>{shapes}\n")
    return f'<g id="f{number}">\n{"".join(lines)}</g>'


def _spans(part: str, y: int) -> Iterator[str]:
    """Yield a row as spans of a fixed width in any font; the bar is there, but cannot be seen."""
    for run in re.finditer("[█░]+|[^█░]+", part):
        x, width = MARGIN + run.start() * WIDTH, len(run[0]) * WIDTH
        unseen = ' fill-opacity="0"' if run[0][0] in BAR else ""
        size = f'textLength="{width}" lengthAdjust="spacingAndGlyphs"'
        yield f'<tspan x="{x}" y="{y}" {size}{unseen}>{html.escape(run[0], quote=False)}</tspan>'
