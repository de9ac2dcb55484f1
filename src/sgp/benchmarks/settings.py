"""Settings and descriptions of all benchmarks. Nothing here imports torch, so the command line starts quickly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sgp.lazy import Deferred
from sgp.settings import MAX_SEED, Settings, check_names, setting

if TYPE_CHECKING:
    from sgp.benchmarks.stream import Stream

# Shape of one input, and the number of classes of each head.
Shape = tuple[tuple[int, ...], list[int]]


@dataclass(frozen=True)
class Benchmark:
    """A named stream of tasks for supervised training.

    Attributes:
        name: Name on the command line and in tables.
        description: One sentence for lists.
        settings: Dataclass of the settings; its defaults are the paper's protocol.
        stream: Function that loads the stream, given the settings, the folder of the data sets (None: $SGP_DATA) and
            the run's seed.
        network: Name of the network that the paper uses.
        datasets: Names of the data sets to read; empty if the benchmark brings its own.
        shape: Function that returns the shape of one input and the number of classes of each head, given the settings,
            so that a network can be validated before any data is read; None if the data decide.
    """

    name: str
    description: str
    settings: type
    stream: Callable[[Any, Path | None, int], Stream]
    network: str
    datasets: tuple[str, ...] = ()
    shape: Callable[[Any], tuple[tuple[int, ...], Sequence[int]]] | None = None


@dataclass(frozen=True)
class GameBenchmark:
    """A named stream of games, which an agent learns one after another.

    Attributes:
        name: Name on the command line and in tables.
        description: One sentence for lists.
        settings: Dataclass of the settings.
        network: Name of the default network.
        stream: Function that loads the games as a `sgp.rl.games.GameStream`, given the settings; None for the
            benchmarks that `sgp.rl` loads itself, whose names and settings can so be known without its packages.
        datasets: Always empty: games bring their own data.
    """

    name: str
    description: str
    settings: type
    network: str
    stream: Callable[[Any], Any] | None = None
    datasets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Digits(Settings):
    """Handwritten digits of 8 x 8 pixels; they need no download."""

    kind: Literal["permuted", "split"] = "permuted"
    """Kind of tasks. permuted: all digits, with the pixels in a new order, and one head; split: two digits and a head
    for each task."""
    tasks: int = setting(10, low=1)
    """Number of tasks to learn; split digits have at most 5."""
    validation: float = setting(0.1, low=0, below=1)
    """Fraction of each task's training images to hold out for validation."""
    validation_seed: int | None = setting(None, low=0, high=MAX_SEED)
    """Seed that draws the validation images; none: the run's seed."""

    def get_shape(self) -> Shape:
        """Return the shape of one image as a row, and the number of classes of each head."""
        return (64,), [10] if self.kind == "permuted" else [2] * min(self.tasks, 5)


@dataclass(frozen=True)
class SplitCIFAR100(Settings):
    """CIFAR-100 in tasks of ten classes, in the order of their labels."""

    tasks: int = setting(10, low=1, high=10)
    """Number of tasks to learn."""
    validation: float = setting(0.05, low=0, below=1)
    """Fraction of each task's training images to hold out for validation."""
    validation_seed: int | None = setting(None, low=0, high=MAX_SEED)
    """Seed that draws the validation images; none: the run's seed. The published code of SGP uses 0."""

    def get_shape(self) -> Shape:
        """Return the shape of one image and the number of classes of each head."""
        return (3, 32, 32), [10] * self.tasks


@dataclass(frozen=True)
class Superclass(Settings):
    """CIFAR-100 in tasks of the five classes of one superclass."""

    tasks: int = setting(20, low=1, high=20)
    """Number of tasks to learn."""
    order: int = setting(0, low=0, high=4)
    """Order of the superclasses; the paper averages over all five."""
    pixels: Literal["true", "scrambled"] = "true"
    """Pixels of the inputs. true: the images; scrambled: as in the published code, which reads planar pixels as
    interleaved ones."""
    validation: float = setting(0.05, low=0, below=1)
    """Fraction of each task's training images to hold out for validation."""
    validation_seed: int | None = setting(None, low=0, high=MAX_SEED)
    """Seed that draws the validation images; none: the run's seed. The published code of SGP uses 0."""

    def get_shape(self) -> Shape:
        """Return the shape of one image and the number of classes of each head."""
        return (3, 32, 32), [5] * 20


@dataclass(frozen=True)
class SplitMiniImageNet(Settings):
    """miniImageNet in tasks of five classes, drawn by a seed."""

    tasks: int = setting(20, low=1, high=20)
    """Number of tasks to learn."""
    class_seed: int | None = setting(None, low=0, high=MAX_SEED)
    """Seed that draws the classes of each task; none: the run's seed."""
    validation: float = setting(0.05, low=0, below=1)
    """Fraction of each task's training images to hold out for validation."""
    validation_seed: int | None = setting(None, low=0, high=MAX_SEED)
    """Seed that draws the validation images; none: the run's seed."""

    def get_shape(self) -> Shape:
        """Return the shape of one image and the number of classes of each head."""
        return (3, 84, 84), [5] * self.tasks


@dataclass(frozen=True)
class PermutedMNIST(Settings):
    """MNIST with the pixels in another order in each task."""

    tasks: int = setting(10, low=1, high=100)
    """Number of tasks to learn."""
    validation: float = setting(0.1, low=0, below=1)
    """Fraction of the training images, the first ones of the file, to hold out for validation."""

    def get_shape(self) -> Shape:
        """Return the shape of one image as a row, and the number of classes of each head."""
        return (28 * 28,), [10]


@dataclass(frozen=True)
class FiveDatasets(Settings):
    """Five data sets of ten classes, one after another: CIFAR-10, MNIST, SVHN, FashionMNIST, notMNIST."""

    tasks: int = setting(5, low=1, high=5)
    """Number of tasks to learn."""
    fashion: Literal["fashion", "digits"] = "fashion"
    """Data of the fourth task. fashion: FashionMNIST; digits: MNIST again, which the published code reads instead."""
    validation: float = setting(0.05, low=0, below=1)
    """Fraction of each task's training images to hold out for validation."""
    validation_seed: int | None = setting(1, low=0, high=MAX_SEED)
    """Seed that draws the validation images; none: the run's seed. The published code uses 1."""

    def get_shape(self) -> Shape:
        """Return the shape of one image and the number of classes of each head."""
        return (3, 32, 32), [10] * self.tasks


@dataclass(frozen=True)
class CLINC150(Settings):
    """Sentences to an assistant: ten domains of fifteen intents."""

    tasks: int = setting(10, low=1, high=10)
    """Number of domains to learn."""
    length: int = setting(32, low=2, high=512)
    """Tokens per text; longer texts are truncated."""
    sentences: int = setting(100, low=2, high=100)
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


@dataclass(frozen=True)
class Atari(Settings):
    """Atari games, observed as four grey frames of 84 x 84 pixels; each action is repeated for four frames."""

    games: str = "kung-fu-master,boxing,jamesbond,krull,riverraid,space-invaders"
    """Names of the games in training order, separated by commas; the paper's six are the default."""
    sticky: float = setting(0.25, low=0, below=1)
    """Probability that a frame repeats the action of the previous frame: 0.25 for v5 of the games, 0 for
    NoFrameskip-v4."""
    noops: int = setting(0, low=0)
    """Maximum number of steps without an action at the start of a game; usually 30 for NoFrameskip-v4."""
    episodic_life: bool = False
    """Whether a lost life ends a training episode; scores are always those of whole games."""
    fire_reset: bool = False
    """Whether a game begins with the action "fire", if it has one."""
    clip_rewards: bool = True
    """Whether training uses only the sign of a reward; scores are never clipped."""
    episode_steps: int = setting(27_000, low=1)
    """Maximum length of a game in steps of four frames; longer games are truncated."""

    def __post_init__(self) -> None:
        """Check the fields, and that no game is named twice."""
        super().__post_init__()
        check_names("games", self.games)


@dataclass(frozen=True)
class MinAtar(Settings):
    """Games of 10 x 10 pixels with a channel for each kind of object, padded to ten channels for all games."""

    games: str = "breakout,space-invaders,freeway"
    """Names of the games in training order, separated by commas."""
    sticky: float = setting(0.1, low=0, below=1)
    """Probability that an action is replaced by the previous action."""
    ramping: bool = True
    """Whether the difficulty of a game increases over time, if the game supports it."""
    episode_steps: int = setting(2_500, low=1)
    """Maximum length of a game in steps; longer games are truncated. freeway ends then by itself."""

    def __post_init__(self) -> None:
        """Check the fields, and that no game is named twice."""
        super().__post_init__()
        check_names("games", self.games)


ALL: tuple[Benchmark | GameBenchmark, ...] = (
    Benchmark(
        name="digits",
        description="Handwritten digits of 8 x 8 pixels, permuted or split; needs no download and takes a minute.",
        settings=Digits,
        stream=Deferred("sgp.benchmarks.digits:load_stream"),
        network="mlp",
        shape=Digits.get_shape,
    ),
    Benchmark(
        name="split-cifar100",
        description="CIFAR-100 in ten tasks of ten classes.",
        settings=SplitCIFAR100,
        stream=Deferred("sgp.benchmarks.split_cifar100:load_stream"),
        network="alexnet",
        datasets=("cifar100",),
        shape=SplitCIFAR100.get_shape,
    ),
    Benchmark(
        name="cifar100-superclass",
        description="CIFAR-100 in twenty tasks of five related classes, in one of five orders.",
        settings=Superclass,
        stream=Deferred("sgp.benchmarks.superclass:load_stream"),
        network="lenet",
        datasets=("cifar100",),
        shape=Superclass.get_shape,
    ),
    Benchmark(
        name="split-miniimagenet",
        description="miniImageNet in twenty tasks of five classes.",
        settings=SplitMiniImageNet,
        stream=Deferred("sgp.benchmarks.miniimagenet:load_stream"),
        network="resnet18",
        datasets=("miniimagenet",),
        shape=SplitMiniImageNet.get_shape,
    ),
    Benchmark(
        name="permuted-mnist",
        description="MNIST with the pixels in another order in each of ten tasks, one head for all.",
        settings=PermutedMNIST,
        stream=Deferred("sgp.benchmarks.permuted_mnist:load_stream"),
        network="mlp",
        datasets=("mnist",),
        shape=PermutedMNIST.get_shape,
    ),
    Benchmark(
        name="five-datasets",
        description="CIFAR-10, MNIST, SVHN, FashionMNIST and notMNIST, one task each.",
        settings=FiveDatasets,
        stream=Deferred("sgp.benchmarks.five_datasets:load_stream"),
        network="resnet18",
        datasets=("cifar10", "mnist", "svhn", "fashion-mnist", "notmnist"),
        shape=FiveDatasets.get_shape,
    ),
    Benchmark(
        name="clinc150",
        description="Intents of sentences to an assistant, in ten tasks by domain.",
        settings=CLINC150,
        stream=Deferred("sgp.benchmarks.texts:load_clinc150"),
        network="minilm",
        datasets=("clinc150",),
    ),
    Benchmark(
        name="fivetext",
        description="Five tasks on texts of different kinds.",
        settings=FiveText,
        stream=Deferred("sgp.benchmarks.texts:load_fivetext"),
        network="minilm",
        datasets=("fivetext",),
    ),
    GameBenchmark("atari", "Six Atari games in a row, learned by PPO.", Atari, "actor-critic"),
    GameBenchmark("minatar", "Three small games in a row, learned by PPO in minutes.", MinAtar, "minatar-actor-critic"),
)
