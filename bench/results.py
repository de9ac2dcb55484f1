"""The page of committed runs, made from their folders: ``python -m bench.results`` writes results/README.md."""

from pathlib import Path

from sgp import paper
from sgp.benchmarks.metrics import acc, bwt
from sgp.runs.config import as_command
from sgp.runs.folder import RunFolder
from sgp.runs.summary import Summary, summary_of
from sgp.training.display import span

RESULTS = Path(__file__).parents[1] / "results"
PAGE = RESULTS / "README.md"
BEGIN, END = "<!-- made by python -m bench.results -->", "<!-- end -->"
TITLES = {
    "split-cifar100": "Split CIFAR-100",
    "cifar100-superclass": "CIFAR-100 Superclass",
    "split-miniimagenet": "Split miniImageNet",
}
HEADER = "| method | preset | recipe | seed | tasks | epochs | ACC (%) | BWT (%) | time | paper: ACC, BWT |"


def runs() -> list[tuple[Path, Summary]]:
    """Every committed run that has finished."""
    found = [(folder, summary_of(RunFolder(folder))) for folder in sorted((RESULTS / "runs").glob("*"))]
    return [(folder, summary) for folder, summary in found if summary.finished]


def tables() -> str:
    """Markdown: one table per benchmark, and the command of each run."""
    lines = []
    for benchmark, title in TITLES.items():
        rows = [(folder, summary) for folder, summary in runs() if summary.config.benchmark == benchmark]
        if not rows:
            continue
        lines += [f"### {title}", "", HEADER, "| --- " * HEADER.count(" | ") + "| --- |"]
        rows.sort(key=lambda item: _order(item[1]))
        lines += [_row(folder, summary) for folder, summary in rows]
        lines += ["", "```sh", *(as_command(summary.config) for _, summary in rows), "```", ""]
    return "\n".join(lines)


def _order(summary: Summary) -> tuple[object, ...]:
    config = summary.config
    return (-len(summary.names), -config.training.epochs, config.preset, config.recipe, config.method, config.seed)


def _row(folder: Path, summary: Summary) -> str:
    config, matrix = summary.config, summary.accuracies
    published = paper.numbers(config.benchmark, config.method)
    theirs = f"{published['acc']:.2f}" if published else ""
    theirs += f", {100 * published['bwt'] + 0.0:.1f}" if "bwt" in published else ""
    cells = [
        f"[{config.method}](runs/{folder.name})",
        config.preset,
        config.recipe,
        config.seed,
        len(summary.names),
        config.training.epochs,
        f"{acc(matrix):.2f}",
        f"{bwt(matrix):.2f}" if len(matrix) > 1 else "",
        span(sum(summary.seconds.values())),
        theirs,
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def page(old: str) -> str:
    """The page with its tables made anew; what people wrote around them stays."""
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
