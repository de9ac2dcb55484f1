"""The command: its version, its subcommands, its imports, Ctrl-C, and the errors for mistakes."""

import subprocess
import sys

import pytest

import sgp
from sgp.cli import COMMANDS, main


def run_without(modules: list[str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the command where some modules cannot be imported, as if they were not installed."""
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({modules!r}));"
        f"from sgp.cli import main; sys.exit(main({arguments!r}))"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_version_needs_nothing_but_the_core() -> None:
    done = run_without(["sklearn", "yaml"], ["--version"])
    assert (done.returncode, done.stdout, done.stderr) == (0, f"sgp {sgp.__version__}\n", "")


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        (["sklearn"], ["scikit-learn"]),
        (["yaml"], ["PyYAML"]),
        (["sklearn", "yaml"], ["scikit-learn", "PyYAML"]),
    ],
    ids=str,
)
def test_a_missing_extra_is_reported_in_one_line(modules: list[str], named: list[str]) -> None:
    for module in {"sklearn", "yaml"} - set(modules):
        pytest.importorskip(module)
    done = run_without(modules, ["run", "digits"])
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line == f'sgp needs {" and ".join(named)}: pip install "sgp-torch[benchmarks]"'


def test_the_package_is_the_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "sgp", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"sgp {sgp.__version__}\n", "")


class TestWithBenchmarks:
    """What needs the extra."""

    @pytest.fixture(autouse=True)
    def _extra(self) -> None:
        for module in ("sklearn", "yaml"):
            pytest.importorskip(module)

    def test_demo_runs_with_the_settings_given(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["demo", "--seeds", "1", "--tasks", "2", "--epochs", "1", "--threshold", "0.9"]) == 0
        output = capsys.readouterr().out
        assert "2 tasks" in output
        assert "threshold 0.9" in output

    @pytest.mark.parametrize("arguments", [["--help"], ["-h"], []], ids=["help", "h", "nothing"])
    def test_help_names_the_subcommands(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(arguments) == 0
        output = capsys.readouterr().out
        for command in COMMANDS:
            assert f"  sgp {command} " in output

    def test_help_of_demo_explains_each_option(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["demo", "--help"]) == 0
        output = capsys.readouterr().out
        for option in ("--seeds", "--tasks", "--epochs", "--alpha", "--threshold"):
            assert option in output

    @pytest.mark.parametrize(
        ("arguments", "clues"),
        [
            (["demo", "--seds", "3"], ["--seds", "--seeds"]),
            (["demo", "--seeds", "many"], ["--seeds", "many"]),
            (["demo", "--threshold", "2"], ["threshold", "(0, 1]", "2.0"]),
        ],
        ids=["option", "type", "value"],
    )
    def test_a_mistake_gets_a_clear_error(
        self, arguments: list[str], clues: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(arguments) == 2
        captured = capsys.readouterr()
        message = captured.out + captured.err
        assert all(clue in message for clue in clues)
        assert "Traceback" not in message

    def test_an_unknown_command_gets_the_nearest(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["dmeo"]) == 2
        assert capsys.readouterr().err == "sgp: there is no command 'dmeo': did you mean demo?\n"

    def test_an_interrupt_ends_with_one_line(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("sgp.demo.comparison.run_demo", interrupted)
        assert main(["demo"]) == 130
        assert capsys.readouterr().err == "sgp: interrupted\n"
