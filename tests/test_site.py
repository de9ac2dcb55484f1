"""The site of docs/ is built without a warning or a network, and opens from the disk."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from waiting import CEILING

pytest.importorskip("material", reason="the site needs mkdocs-material, of the extra 'docs'")
pytest.importorskip("mkdocstrings", reason="the site needs mkdocstrings, of the extra 'docs'")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
# mkdocs, in a process that can reach nobody.
BUILD = """
import socket

def refuse(*_):
    raise OSError("the build asks the network")

socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli()
"""


class Page(HTMLParser):
    """Links and loaded files of a page, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.places |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a":
            self.links += [values["href"]] if "href" in values else []
        else:
            self.loaded += [values[name] for name in ("src", "href", "data") if name in values]


def build(target: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    arguments = ["build", "--strict", "--config-file", str(config), "--site-dir", str(target)]
    return subprocess.run(
        [sys.executable, "-c", BUILD, *arguments],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=CEILING,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    built = build(target)
    assert built.returncode == 0, built.stdout
    return target


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_page_of_the_docs_is_in_the_navigation(site: Path, pages: dict[Path, Page]) -> None:
    docs = ROOT / "docs"
    written = {site / path.relative_to(docs).with_suffix(".html") for path in docs.rglob("*.md")}
    gallery = {path.stem for path in (ROOT / "examples/gallery").glob("*.py")} - {"figure"} | {"index"}
    elsewhere = ["results", "examples", "contributing", "changelog", *(f"gallery/{name}" for name in gallery)]
    assert set(pages) == written | {site / f"{name}.html" for name in elsewhere}
    for path, page in pages.items():
        # What all pages have in common is the navigation, in which a page's link to itself is its own name.
        linked = {(path.parent / urlsplit(link).path).resolve() for link in page.links}
        assert set(pages) <= linked, path.name


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert page.loaded
        for address in page.loaded:
            parts = urlsplit(address)
            assert not parts.scheme, f"{path.name}: {address}"
            assert not parts.netloc, f"{path.name}: {address}"
            assert (path.parent / unquote(parts.path)).exists(), f"{path.name}: {address}"
    sheets = list(site.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        assert not re.search(r"@import|url\(\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_links_inside_the_site_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_relative_to(site), f"{path.name}: {link}"
            assert target in pages, f"{path.name}: {link}"
            if parts.fragment:
                assert unquote(parts.fragment) in pages[target].places, f"{path.name}: {link}"


def test_the_results_are_those_of_the_committed_page(site: Path) -> None:
    shown = re.sub(r"<[^>]+>|\s", "", (site / "results.html").read_text(encoding="utf-8"))
    text = (ROOT / "results/README.md").read_text(encoding="utf-8")
    rows = [line for line in re.findall(r"^\| .+ \|$", text, re.M) if "](runs/" in line]
    assert rows
    for row in rows:
        assert re.sub(r"\]\([^)]*\)|[\s|[]", "", row) in shown


def test_the_reference_has_no_leftovers_of_another_markup(site: Path) -> None:
    for path in (site / "api").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r":(meth|func|class):", text), path.name
        assert "::</p>" not in text, path.name
    memory = (site / "api/memory.html").read_text(encoding="utf-8")
    for name in ("attach", "update", "plan", "project", "check", "save", "load"):
        assert f'id="sgp.GradientMemory.{name}"' in memory
    assert 'href="#sgp.GradientMemory.update"' in memory


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Copy the sources of the site, to break something in them."""
    for name in ("mkdocs.yml", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("docs", "results", "examples", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_a_page_that_nobody_finds_or_a_dead_link_ends_the_build(copied: Path) -> None:
    (copied / "docs/lost.md").write_text("# Lost\n\n[away](nowhere.md), [deep](limits.md#nowhere)\n", encoding="utf-8")
    built = build(copied / "site", copied / "mkdocs.yml")
    assert built.returncode != 0
    assert "- lost.md" in built.stdout
    assert "'nowhere.md'" in built.stdout
    assert "'limits.md#nowhere'" in built.stdout


CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no chromium with its chromedriver here")
def test_the_search_finds_a_page_that_was_opened_from_the_disk(site: Path, tmp_path: Path) -> None:
    webdriver = pytest.importorskip("selenium.webdriver", reason="drives the browser")
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    try:
        driver.set_page_load_timeout(CEILING)
        driver.get((site / "index.html").as_uri() + "?q=register_layer")
        found = "a.md-search-result__link[href*='your-own-model.html']"
        WebDriverWait(driver, CEILING).until(lambda page: page.find_elements("css selector", found))
        assert driver.get_log("browser") == []
        messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
        asked = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        assert asked
        # The browser shows pages of its own before ours, from chrome addresses.
        assert not [address for address in asked if urlsplit(address).scheme in ("http", "https", "ws", "wss")]
    finally:
        driver.quit()
