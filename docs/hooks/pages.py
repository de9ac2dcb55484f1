"""Pages of the site that lie elsewhere in the repository, and links that work there, on GitHub and in the site.

A page in docs/ links to a file of the repository by its relative path. In the site such a link leads to the page made
of the file; where there is none, only the text stays.

Each script of the gallery is a page: the text of its docstring, its code, and its figure.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# File of the repository -> page of the site that it is.
ELSEWHERE = {
    "results/README.md": "results.md",
    "examples/README.md": "examples.md",
    "examples/gallery/README.md": "gallery/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
SCRIPTS = sorted(path for path in (ROOT / "examples/gallery").glob("*.py") if path.stem != "figure")
ELSEWHERE |= {f"examples/gallery/{script.name}": f"gallery/{script.stem}.md" for script in SCRIPTS}
LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Replace a folder in the navigation by its index.md and the pages that it links to, in order."""
    config.nav = _expanded(config.nav)


def _expanded(entry: Any) -> Any:
    if isinstance(entry, list):
        return [_expanded(each) for each in entry]
    if isinstance(entry, dict):
        return {title: _expanded(each) for title, each in entry.items()}
    if not entry.endswith("/"):
        return entry
    index = (ROOT / "docs" / entry / "index.md").read_text(encoding="utf-8")
    pages = [target for _, target, _ in LINK.findall(index) if "/" not in target]
    return [entry + page for page in dict.fromkeys(["index.md", *pages])]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages from elsewhere."""
    for source, page in ELSEWHERE.items():
        if source.endswith(".py"):
            files.append(File.generated(config, page, content=write_page(ROOT / source)))
        else:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))


def write_page(script: Path) -> str:
    """Return the page of a script of the gallery."""
    source = script.read_text(encoding="utf-8")
    module = ast.parse(source)
    title, _, text = (ast.get_docstring(module) or "").partition("\n")
    code = "\n".join(source.splitlines()[module.body[0].end_lineno or 0 :]).strip()
    themes = ("light", "dark")
    alt = f"{title} The score of each task while one after another is learned"
    figures = [f"![{alt}](../images/gallery/{script.stem}-{theme}.svg#only-{theme})" for theme in themes]
    command = f"In a clone, `python -m examples.gallery.{script.stem}` draws the figure:"
    return "\n\n".join([f"# {title.removesuffix('.')}", text.strip(), f"```python\n{code}\n```", command, *figures])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages."""
    sources = {page: source for source, page in ELSEWHERE.items()}
    uri = page.file.src_uri
    folder = posixpath.dirname(sources.get(uri, f"docs/{uri}"))

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        there = ELSEWHERE.get(path) or path.removeprefix("docs/")
        if files.get_file_from_path(there) is not None:
            return f"[{text}]({posixpath.relpath(there, posixpath.dirname(uri) or '.')}{anchor or ''})"
        return text if (ROOT / path).exists() else link[0]

    return LINK.sub(replaced, markdown)
