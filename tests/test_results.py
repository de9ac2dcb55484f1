"""The page of results says what the committed runs say."""

import shlex
from pathlib import Path

import pytest

from bench import results
from sgp.cli.run import parse
from sgp.experiments.config import as_command
from sgp.experiments.folder import RunFolder

FOLDERS = sorted((results.RESULTS / "runs").glob("*"))


def test_the_pages_are_made_from_the_runs() -> None:
    for path, text in results.pages().items():
        assert path.read_text(encoding="utf-8") == text, "run python -m bench.results"
    assert FOLDERS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_command_of_a_run_gives_its_config(folder: Path) -> None:
    config = RunFolder(folder).read_config()
    command, subcommand, *arguments = shlex.split(as_command(config))
    assert (command, subcommand) == ("sgp", "run")
    assert parse(arguments)[1] == config
