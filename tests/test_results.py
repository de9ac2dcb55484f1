"""The pages of results are made from the committed runs, whose commands make them again."""

import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest

from bench import results
from sgp.cli.run import parse_request
from sgp.experiments.config import as_command
from sgp.experiments.folder import RunFolder

IGNORED = results.RESULTS / ".gitignore"
FOLDERS = sorted((results.RESULTS / "runs").glob("*"))


def test_the_pages_are_made_from_the_runs() -> None:
    for path, text in results.make_pages().items():
        assert path.read_text(encoding="utf-8") == text, "run python -m bench.results"
    assert FOLDERS


def test_a_run_is_committed_without_checkpoints_and_logs() -> None:
    ignored = [line.rpartition("/")[2] or "checkpoint" for line in IGNORED.read_text().splitlines() if "*" in line]
    kinds = {"config.yaml", "versions.json", "metrics.jsonl"}
    for path in (file for folder in FOLDERS for file in folder.iterdir()):
        if not any(fnmatch(path.name, pattern) for pattern in ignored):
            assert path.name in kinds or path.suffix == ".csv", path


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_command_of_a_run_gives_its_config(folder: Path) -> None:
    config = RunFolder(folder).read_config()
    command, subcommand, *arguments = shlex.split(as_command(config))
    assert (command, subcommand) == ("sgp", "run")
    assert parse_request(arguments).config == config
