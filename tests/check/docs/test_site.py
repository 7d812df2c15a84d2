"""The documentation site: it builds, no link is dead, and a reader needs no network."""

from __future__ import annotations

import functools
import html.parser
import itertools
import json
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import py_mini_racer
import pytest

from tests.support import repository

sys.path.insert(0, str(repository.ROOT / "docs"))

import messages

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


def test_home_is_the_beginning_of_readme(site: Path) -> None:
    """With the recording, and links to pages of the site."""
    home = (site / "index.html").read_text()
    picture = re.search(r'<img alt="A terminal: [^"]+" src="(_images/session.svg)"', home)
    assert picture
    assert not re.search(r"href|url\(|@import|font-face", (site / picture[1]).read_text())
    assert 'href="quickstart.html"' in home
    assert "make test" not in home


# -- search ------------------------------------------------------------------------------------

#: What a browser gives to the scripts of the search, as far as they look for results.
BROWSER = """
var window = globalThis, document = {getElementById: () => null}, _ready = () => {}, _ = (text) => text;
var SPHINX_HIGHLIGHT_ENABLED = false;
"""
RESULTS = "JSON.stringify(Search._performSearch(...Search._parseQuery({})).map((result) => result[0]))"
#: As a browser runs them: the last one is deferred.
SCRIPTS = ("_static/searchtools.js", "_static/language_data.js", "searchindex.js", "_static/search.js")
#: In place of what differs in a message.
DETAILS = ("17825792", "http://images.example.org/vm-7.qcow2", "/var/lib/images/vm-7.img", "'eth0'")


def printed() -> Iterator[tuple[str, bool]]:
    """Yield each message as commands and pods print it, and its reason alone; and whether it is whole."""
    details = itertools.cycle(DETAILS)
    for name, kind in messages.KINDS.items():
        wholes = f"cdi-worker: {kind.terminal or kind.template}", kind.phrase + kind.template
        for reason in messages.reasons().get(name, [messages.DETAILS]):
            fields = dict.fromkeys(messages.WHY, reason)
            for text in (reason, *wholes):
                words = re.sub(r"\{(\w+)[^}]*\}", lambda field, by=fields: by.get(field[1], "…"), text)
                # Without details there must be something to search for.
                if re.search("[a-z]{4}.*[a-z]{4}", words.removeprefix("cdi-worker")):
                    yield re.sub("…", lambda _: next(details), words), text in wholes


def test_search_finds_every_message(site: Path) -> None:
    """The scripts of the site, with what somebody pastes from a terminal or a pod's status."""
    script = (site / "search.html").read_text()
    engine = py_mini_racer.MiniRacer()
    engine.eval(f"{BROWSER};0")
    for name in SCRIPTS:
        assert f'src="{name}' in script
        engine.eval(f"{(site / name).read_text()};0")
    missed, count = [], 0
    for text, is_whole in printed():
        pages = json.loads(engine.eval(RESULTS.format(json.dumps(text))))[::-1]
        count += 1
        if "troubleshooting" not in pages[: 3 if is_whole else None]:
            missed.append((text, pages[:3]))
    assert count > 1500
    assert not missed


# -- the site ----------------------------------------------------------------------------------


def test_commands_can_be_copied(site: Path) -> None:
    """The script of the button takes what follows a prompt, and leaves the output."""
    script = (site / "_static/copybutton.js").read_text()
    assert "formatCopyText(text, '$ ', false, true, true" in script


def test_pages_link_to_the_repository_where_it_is_known(tmp_path: Path) -> None:
    address = "https://github.com/example/cdi-worker"
    source = tmp_path / "docs"
    source.mkdir()
    (source / "index.md").write_text("# Home\n")
    option = f"html_theme_options.source_repository={address}"
    command = [sys.executable, "-m", "sphinx", "--quiet", "-c", DOCS, "-D", option, source, tmp_path / "html"]
    subprocess.run(command, check=True, cwd=repository.ROOT, timeout=100)
    page = (tmp_path / "html/index.html").read_text()
    assert f'href="{address}/edit/main/docs/index.md"' in page
    assert re.search(rf'<a class="reference external" href="{address}">Source code</a>', page)


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
