"""Settings of the benchmark texts."""

from __future__ import annotations

from dataclasses import dataclass

from sgp.benchmarks.benchmark import Benchmark
from sgp.lazy import Deferred
from sgp.settings import Settings, setting

DOMAINS = 10
# Training sentences of each intent.
SENTENCES = 100


@dataclass(frozen=True)
class CLINC150(Settings):
    """Sentences to an assistant: ten domains of fifteen intents."""

    tasks: int = setting(DOMAINS, low=1, high=DOMAINS)
    """Number of domains to learn."""
    length: int = setting(32, low=2, high=512)
    """Tokens per text; longer texts are truncated."""
    sentences: int = setting(100, low=2, high=SENTENCES)
    """Training sentences of each intent."""


@dataclass(frozen=True)
class FiveText(Settings):
    """Topics, polarity, intents of a bank's customers, subjectivity, emotions."""

    tasks: int = setting(5, low=1, high=5)
    """Number of tasks to learn."""
    length: int = setting(32, low=2, high=512)
    """Tokens per text; longer texts are truncated."""
    texts: int | None = setting(800, low=2)
    """Training texts of each task, at least 2 of each class, drawn by the run's seed; none: all."""
    validation: float = setting(0.1, low=0, below=1)
    """Fraction of the training texts of each class to hold out for validation."""


CLINC150_BENCHMARK = Benchmark(
    name="clinc150",
    description="Intents of sentences to an assistant, in ten tasks by domain.",
    settings=CLINC150,
    stream=Deferred("sgp.benchmarks.texts:load_clinc150"),
    network="minilm",
    datasets=("clinc150",),
)
FIVETEXT_BENCHMARK = Benchmark(
    name="fivetext",
    description="Five tasks on texts of different kinds.",
    settings=FiveText,
    stream=Deferred("sgp.benchmarks.texts:load_fivetext"),
    network="minilm",
    datasets=("fivetext",),
)
