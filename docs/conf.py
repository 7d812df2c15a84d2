"""Settings of the documentation site, for Sphinx (`make docs`)."""

from __future__ import annotations

import html
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from docutils import nodes

sys.path.insert(0, str(Path(__file__).parent))

project = "cdi-worker"
author = "the cdi-worker authors"
project_copyright = author
release = version = metadata.version("cdi-worker")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "tables"]
# A copied block has its commands, without prompts and output.
copybutton_prompt_text = "$ "
source_suffix = {".md": "markdown"}
exclude_patterns = ["_static"]

# Links to headings work as on GitHub.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# Names of the program are not links to the API, as `size` in a docstring.
default_role = "literal"
smartquotes = False

html_theme = "furo"
html_title = f"cdi-worker {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
# Nothing is fetched from the network: furo brings its own scripts and styles, and uses the reader's fonts.
# With a repository, which `make docs REPOSITORY=...` names, pages have a link to it, and one to change them.
html_theme_options = {"source_branch": "main", "source_directory": "docs/"}
# Two builds of one commit are the same.
html_last_updated_fmt = None

#: Files of the repository that are pages of the site too.
INCLUDED = {
    "CONTRIBUTING.md": "about/contributing.md",
    "SECURITY.md": "about/vulnerabilities.md",
    "CHANGELOG.md": "about/changelog.md",
}


def setup(app: Any) -> None:
    """Register the translation of links (Sphinx calls this)."""
    app.connect("source-read", _links)
    app.connect("html-page-context", _describe)


def _describe(app: Any, page: str, _template: str, context: dict[str, Any], tree: Any) -> None:
    """Describe a page for search engines by its first sentences; let the search find messages."""
    if page == "search":
        # After the script that it changes, which stands in the page.
        app.add_js_file("search.js", loading_method="defer")
    if tree is not None:
        text = " ".join(" ".join(each.astext() for each in tree.findall(nodes.paragraph)).split())[:200]
        context["metatags"] = (
            f'{context.get("metatags", "")}<meta name="description" content="{html.escape(text)}">\n'
        )


#: The first entry beside all pages.
SOURCE = """
```{{toctree}}
:hidden:

Source code <{}>
```

"""


def _links(app: Any, page: str, source: list[str]) -> None:
    """Lead links to files of the repository to their pages, or to the repository, if it is known."""
    here = Path(page).parent
    repository = app.config.html_theme_options.get("source_repository")
    if page == app.config.root_doc and repository:
        text, mark, others = source[0].partition("```{toctree}")
        source[0] = f"{text}{SOURCE.format(repository)}{mark}{others}"

    def lead(link: re.Match[str]) -> str:
        text, path, heading = link.groups("")
        file = os.path.normpath(Path("docs", here, path))
        if file.startswith("docs/"):
            return link[0]
        if file in INCLUDED:
            return f"[{text}]({os.path.relpath(INCLUDED[file], here)}{heading})"
        if repository:
            return f"[{text}]({repository}/blob/main/{file})"
        name = f"`{file}`"
        return name if text.strip("`") in {file, Path(file).name} else f"{text} ({name})"

    source[0] = re.sub(r"\[([^]]+)\]\((\.\.[^)#]*)(#[^)]*)?\)", lead, source[0])
