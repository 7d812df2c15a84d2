"""The directive ``{recording}``: commands of the page of a first session, as a picture of a terminal.

A test runs that page's commands and compares their output (tests/check/docs/test_transcript.py), so the
picture is what a reader will see. It is drawn by rich while the site is built, without its fonts, which
would be fetched.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from rich import console, terminal_theme, text

SESSION = Path(__file__).with_name("quickstart.md")
#: Columns of the picture.
WIDTH = 110
STYLE = """\
<svg class="recording" role="img" aria-label="{label}" viewBox="0 0 {{width}} {{height}}" \
xmlns="http://www.w3.org/2000/svg">
<style>
.{{unique_id}}-matrix {{{{ font: {{char_height}}px monospace; line-height: {{line_height}}px; }}}}
{{styles}}
</style>
<defs>
<clipPath id="{{unique_id}}-clip-terminal">
<rect x="0" y="0" width="{{terminal_width}}" height="{{terminal_height}}" />
</clipPath>
{{lines}}
</defs>
{{chrome}}
<g transform="translate({{terminal_x}}, {{terminal_y}})" clip-path="url(#{{unique_id}}-clip-terminal)">
{{backgrounds}}
<g class="{{unique_id}}-matrix">
{{matrix}}
</g>
</g>
</svg>
"""


def session(*beginnings: str) -> str:
    """Return the first command of the session with each beginning, and its output."""
    blocks = re.findall(r"^```console\n(.*?)^```$", SESSION.read_text(), re.DOTALL | re.MULTILINE)
    return "\n".join(next(each for each in blocks if each.startswith(f"$ {start}")) for start in beginnings)


def picture(shown: str) -> str:
    """Return commands and their output as SVG, which is described by the commands."""
    commands = [line for line in shown.splitlines() if line.startswith("$ ")]
    label = "; ".join(line.removeprefix("$ ") for line in commands).replace('"', "&quot;")
    drawn = console.Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in shown.splitlines():
        drawn.print(text.Text(line, style="bold green" if line in commands else ""), highlight=False)
    return drawn.export_svg(
        title="cdi-worker",
        theme=terminal_theme.MONOKAI,
        code_format=STYLE.format(label=label),
        unique_id="session",
    )


class Recording(Directive):
    """``{recording}``: each line of the content is the beginning of a command."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the picture."""
        return [nodes.raw("", picture(session(*self.content)), format="html")]


def setup(app: Any) -> dict[str, bool]:
    """Register the directive (Sphinx calls this)."""
    app.add_directive("recording", Recording)
    return {"parallel_read_safe": True}
