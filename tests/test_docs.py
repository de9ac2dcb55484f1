"""Numbers in the docs are those of the committed runs."""

import json
import re
from pathlib import Path

import pytest

from sgp.benchmarks import BENCHMARKS
from sgp.methods import METHODS

ROOT = Path(__file__).parents[1]


def test_samples_and_threshold_are_those_that_were_measured() -> None:
    measured = json.loads((ROOT / "bench/ranks.json").read_text())
    known = {
        (row["samples"], row["threshold"], row["layer"]): f"{row['rank']} ({100 * row['energy']:.0f} %)"
        for row in measured["samples_and_threshold"]
    }
    text = (ROOT / "docs/limits.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (0\.\d+) \| (.+?) \| (.+?) \| (.+?) \|$", text, re.M)
    assert len(rows) == 12
    for samples, threshold, *cells in rows:
        for layer, cell in zip(("conv2", "fc1", "fc2"), cells, strict=True):
            assert cell == known[int(samples), float(threshold), layer]
    for task in measured["tasks"]:
        assert f"| {task['task'] + 1} | {' | '.join(map(str, task['ranks'].values()))} |" in text


def test_speeds_in_the_docs_are_those_that_were_measured() -> None:
    measured = json.loads((ROOT / "results/bench.json").read_text())
    rows = {row["name"]: row for row in measured["rows"]}
    table = re.findall(r"^\| ([^|]+?) \| (1/\d+|\d\.\d+) \| ([\d./]*) ?\|$", (ROOT / "docs/speed.md").read_text(), re.M)
    names = [
        "AlexNet, SGD, batch 64",
        "epoch of a later CIFAR task",
        "PPO agent, Adam, batch 250",
        "Memory update, task 1",
        "Memory update, task 2",
        "Peak memory of an update, 8192 samples",
        "12 layers of 64, Adam",
        "12 layers of 64, SGD",
        "12 layers of 48 to 92, scheduled rate, Adam",
        "12 layers of 48 to 92, scheduled rate, SGD",
    ]
    assert len(table) == len(names)
    for (_, ratio, published), name in zip(table, names, strict=True):
        row = rows[name]
        assert ratio == (f"1/{1 / row['ratio']:.0f}" if row["ratio"] < 0.2 else f"{row['ratio']:.2f}")
        if row["published_ratio"] and row["against"] == "plain":
            assert published == f"{row['published_ratio']:.2f}"
    assert not measured["quick"]


def test_the_speeds_of_wide_layers_are_those_that_were_measured() -> None:
    measured = json.loads((ROOT / "results/bench.json").read_text())["rows"]
    rows = {row["name"]: row for row in measured if row["name"].startswith("Update of a layer")}
    text = (ROOT / "docs/wide-layers.md").read_text()
    cells = r"^\| ([\d,]+), (\d\.\d), (first|second) \| (\w+) \| (\d\.\d\d) \| [\d.]* \| (\d+)\b"
    table = re.findall(cells, text, re.M)
    assert len(table) == len(rows)
    for width, exponent, task, path, ratio, bases in table:
        number = 1 + (task == "second")
        row = rows[f"Update of a layer of width {width.replace(',', '')}, exponent {exponent}, task {number}"]
        assert (path, int(bases)) == (row["detail"]["path"], row["detail"]["bases"])
        assert ratio == f"{row['ratio']:.2f}"


def test_the_results_in_the_readme_are_those_of_the_committed_runs() -> None:
    def rows(path: str) -> list[list[float]]:
        """Return ACC, BWT, their deviations, megabytes and time of each row that has them all."""
        lines = (ROOT / path).read_text().replace("*", "").splitlines()
        cells = [re.findall(r"-?\d+\.\d+", line.partition("|")[2].partition("|")[2]) for line in lines]
        return [list(map(float, each)) for each in cells if len(each) == 6]

    ours, known = rows("README.md"), rows("docs/fine-tune.md")
    assert len(ours) == 9
    for row, measured in zip(ours, known, strict=False):  # the page has another benchmark after it
        assert row == pytest.approx(measured, abs=0.051)


def test_every_method_has_a_page_and_a_row_in_the_table_of_methods() -> None:
    text = (ROOT / "docs/methods/index.md").read_text()
    table = dict(re.findall(r"^\| \[`([^`]+)`\]\([^)]+\) \| [^|]+ \| ([^|]+) \|", text, re.M))
    assert table.keys() == set(METHODS)
    for name, keeps_data in table.items():
        assert (ROOT / f"docs/methods/{name}.md").is_file(), name
        joint = METHODS[name].trains_jointly
        assert keeps_data == ("all at once" if joint else "yes" if METHODS[name].keeps_data else "no"), name


def test_every_benchmark_has_a_row_with_its_network_in_the_table_of_benchmarks() -> None:
    rows = re.findall(r"^\| `(.+?)` \| .+ \| `(.+?)` \| .+ \|$", (ROOT / "docs/benchmarks.md").read_text(), re.M)
    assert dict(rows) == {name: BENCHMARKS[name].network for name in BENCHMARKS}


def test_a_file_of_the_core_imports_only_files_above_it_in_the_table_of_the_architecture() -> None:
    core = ROOT / "src/sgp/projection"
    text = (ROOT / "docs/architecture.md").read_text()
    table = re.findall(r"^\| `(\w+)\.py` \| ", text.partition("## The package `sgp.projection`")[2], re.M)
    assert sorted(table) == sorted(path.stem for path in core.glob("*.py") if path.stem != "__init__")
    for position, name in enumerate(table):
        imported = re.findall(r"^\s*from sgp\.projection\.(\w+) import", (core / f"{name}.py").read_text(), re.M)
        assert set(imported) <= set(table[:position]), name


def test_every_test_that_the_page_on_compatibility_names_exists() -> None:
    text = (ROOT / "docs/works-with.md").read_text()
    for evidence in re.findall(r"^\| .+ \| (?:tested|tested, emulated|refused) \| (.*)\|$", text, re.M):
        assert "test" in evidence, evidence
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert named
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [
        *ROOT.glob("*.md"),
        ROOT / "results/README.md",
        ROOT / "examples/README.md",
        ROOT / "examples/gallery/README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)  # code may look like a link
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", text):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor and path.suffix == ".md":  # that of an image says in which color scheme it is shown
                titles = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
                assert anchor[1:] in {re.sub(r"[^a-z0-9 -]", "", t.lower()).replace(" ", "-") for t in titles}


def test_the_repository_has_one_address_everywhere() -> None:
    places = {
        "CITATION.cff": r'^repository-code: "(.+)"$',
        "pyproject.toml": r'^Repository = "(.+)"$',
        "mkdocs.yml": r"^repo_url: (.+)$",
    }
    found = {name: re.findall(pattern, (ROOT / name).read_text(), re.M) for name, pattern in places.items()}
    assert all(found.values())
    assert len({address for addresses in found.values() for address in addresses}) == 1, found
