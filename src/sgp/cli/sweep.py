"""Command ``sgp sweep FILE.yaml``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from sgp.cli.arguments import exit_on, flag, parse_into, positional
from sgp.cli.importing import import_files
from sgp.experiments.config import Precision
from sgp.experiments.sweep import read_sweep
from sgp.settings import Settings, setting


@dataclass(frozen=True)
class Options(Settings):
    """Run a grid of runs: every method with every seed and every value of its settings.

    The file is a config file in which any value can be a list. Finished runs are not repeated and stopped runs are
    resumed, so the same command continues a sweep that was stopped.
    """

    file: str = positional("FILE")
    """Path of the grid, or the name of one of the paper's sweeps, such as alpha."""
    out: Path = Path("runs")
    """Folder that contains the runs' folders."""
    data: Path | None = None
    """Folder with the data sets; by default $SGP_DATA."""
    device: str | None = None
    """Torch device of all runs, such as cuda or cuda:1; by default that of the file, or cpu."""
    precision: Precision | None = None
    """Precision of all runs; by default that of the file, or float32."""
    jobs: int | None = setting(None, low=1)
    """Number of parallel runs on this machine; by default as many as its cores allow. Each has OMP_NUM_THREADS threads
    if that is set."""
    ray: str | None = None
    """Address of a Ray cluster to run on instead: auto for the one of this machine, local for a new one. All its nodes
    must see the same files."""
    retries: int = setting(3, low=0)
    """With --ray: how often a run is resumed whose node or process was killed."""
    import_: tuple[Path, ...] = ()
    """Python file that registers your own method, network or benchmark; can be given several times."""
    plan: bool = flag()
    """Print the commands without running them."""

    def __post_init__(self) -> None:
        """Check the fields, and that --ray and --jobs go together."""
        super().__post_init__()
        if self.ray is not None and self.ray not in ("auto", "local") and ":" not in self.ray:
            raise ValueError(f"ray must be auto, local or an address with a port, got {self.ray!r}")
        if self.jobs is not None and self.ray is not None:
            raise ValueError("jobs is for this machine: with --ray the cluster decides how many runs are parallel")

    @property
    def overrides(self) -> dict[str, str]:
        """Settings that replace those of the file."""
        values = {"device": self.device, "precision": self.precision}
        return {name: value for name, value in values.items() if value is not None}


def main(arguments: list[str]) -> int:
    """Run the grid of a file."""
    options = parse_into(Options, "sgp sweep FILE [OPTIONS]", arguments)
    with exit_on(ValueError, ImportError):
        import_files(options.import_)
        sweep = read_sweep(options.file, options.overrides)
    # This imports torch: mistakes in the arguments are reported before.
    from sgp.cli.launch_sweep import launch_sweep

    return launch_sweep(sweep, options, resume=shlex.join(["sgp", "sweep", *arguments]))
