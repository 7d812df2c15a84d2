"""The documentation site: it builds, no link is dead, and a reader needs no network."""

from __future__ import annotations

import functools
import html as html_module
import html.parser
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

from tests.support import repository

DOCS = repository.ROOT / "docs"


class Page(html.parser.HTMLParser):
    """The links of a page, the files that it loads, and the targets in it (``ids``)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag != "a":
            self.loaded += [
                given[name] for name in ("src", "href", "srcset", "data", "poster") if name in given
            ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    built = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "--quiet",
        "--fail-on-warning",
        "--keep-going",
        "-d",
        built / "doctrees",
    ]
    done = subprocess.run(
        [*command, DOCS, built / "html"],
        check=False,
        cwd=repository.ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return built / "html"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Every page of the site, by its file."""
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme in {"http", "https"}:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            fragment = urllib.parse.unquote(parts.fragment)
            if not target.is_file() or (target in pages and fragment not in pages[target].ids):
                dead.append((path.name, link))
    assert not dead


def test_nothing_is_fetched_from_the_network(site: Path, pages: dict[Path, Page]) -> None:
    """No script, style, font or picture of another server; what a page loads is in the site."""
    for path, page in pages.items():
        for name in page.loaded:
            parts = urllib.parse.urlsplit(name)
            assert parts.scheme in {"", "data"}, (path, name)
            assert not parts.netloc, (path, name)
            if parts.path and not parts.scheme:
                assert (path.parent / parts.path).exists(), (path, name)
    for style in site.rglob("*.css"):
        fetched = re.findall(r"(?:url\(|@import)\s*[\"']?(?!data:)(?:https?:)?//[^)\"']+", style.read_text())
        assert not fetched, style
    for script in site.rglob("*.js"):
        code = script.read_text()
        assert not re.search(r"(?:fetch|importScripts|import|open)\(\s*[\"'`](?:https?:)?//", code), script


def test_home_shows_a_session_as_a_picture(site: Path) -> None:
    home = (site / "index.html").read_text()
    picture = home[home.index('<svg class="recording"') :]
    picture = picture[: picture.index("</svg>")]
    shown = " ".join(html_module.unescape(re.sub(r"<[^>]+>", "", picture)).split())
    for part in (
        "$ cdi-worker inspect http",
        "100.0% done",
        "virtual size 67108864 bytes (64.0 MiB)",
        "uploaded disk.img",
    ):
        assert part in shown, part
    assert "font-face" not in picture


def test_commands_can_be_copied(site: Path) -> None:
    """The script of the button takes what follows a prompt, and leaves the output."""
    script = (site / "_static/copybutton.js").read_text()
    assert "formatCopyText(text, '$ ', false, true, true" in script


def test_pages_can_be_changed_where_the_repository_is_known(tmp_path: Path) -> None:
    address = "https://github.com/example/cdi-worker"
    source = tmp_path / "docs"
    source.mkdir()
    (source / "index.md").write_text("# Home\n")
    option = f"html_theme_options.source_repository={address}"
    command = [sys.executable, "-m", "sphinx", "--quiet", "-c", DOCS, "-D", option, source, tmp_path / "html"]
    subprocess.run(command, check=True, cwd=repository.ROOT, timeout=100)
    assert f'href="{address}/edit/main/docs/index.md"' in (tmp_path / "html/index.html").read_text()


def test_every_public_name_is_in_the_api(site: Path) -> None:
    import cdi_worker

    text = (site / "reference/api.html").read_text()
    missing = [
        name for name in cdi_worker.__all__ if f"cdi_worker.{name}" not in text and f">{name}<" not in text
    ]
    assert missing == ["__version__"]


# -- in the repository -------------------------------------------------------------------------


@functools.cache
def headings(path: Path) -> frozenset[str]:
    """Return the anchors of a Markdown file's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


def markdown() -> list[Path]:
    """Return the Markdown files of the repository."""
    return [*repository.ROOT.glob("*.md"), *DOCS.rglob("*.md"), *repository.ROOT.glob("deploy/**/*.md")]


def test_links_in_the_repository_lead_somewhere() -> None:
    """README and the pages are read there, too."""
    dead = []
    for path in markdown():
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            parts = urllib.parse.urlsplit(link)
            target = path.parent / parts.path if parts.path else path
            if parts.scheme:
                continue
            if not target.exists() or (parts.fragment and parts.fragment not in headings(target.resolve())):
                dead.append((str(path.relative_to(repository.ROOT)), link))
    assert not dead


def test_no_paragraph_is_longer_than_ten_lines() -> None:
    long = []
    for path in (each for each in markdown() if each.name != "CHANGELOG.md"):
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        # An item of a list is one, too; tables, code and the addresses of links are none.
        parts = re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", text)
        texts = [part.strip() for part in parts if not part.lstrip("\n").startswith(("|", "    ", "["))]
        name = str(path.relative_to(repository.ROOT))
        long += [(name, part[:60]) for part in texts if part.count("\n") >= 10]
    assert not long


def test_pages_that_code_and_texts_name_exist() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repository.ROOT, capture_output=True, text=True, check=True
    )
    missing = []
    for name in listed.stdout.split("\0"):
        path = repository.ROOT / name
        if path.suffix in {".py", ".md", ".h", ".c", ".toml", ""} and path.is_file():
            found = re.findall(r"(?<![/\w])docs/[\w/-]+\.md", path.read_text(errors="replace"))
            missing += [(name, page) for page in found if not (repository.ROOT / page).is_file()]
    assert not missing


def test_every_page_has_a_description(site: Path) -> None:
    pages = [
        path
        for path in site.rglob("*.html")
        if path.name not in {"genindex.html", "py-modindex.html", "search.html"}
    ]
    assert len(pages) > 30
    for path in pages:
        assert re.search(r'<meta name="description" content="[^"]{20,}', path.read_text()), path
