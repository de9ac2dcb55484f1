"""Config of a run: every setting that its results depend on, typed, and as flat names and values in a file.

Nothing here imports torch: a config is built and validated before torch, data or a network are loaded.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_type_hints

from sgp.benchmarks import BENCHMARKS, Benchmark, GameBenchmark
from sgp.methods import METHODS
from sgp.networks import NETWORKS
from sgp.paper import Preset, Recipe, comparison, has_recipe, settings
from sgp.rl.settings import PPOSettings
from sgp.settings import MAX_SEED, Settings, convert, setting, validate_fields
from sgp.yaml_file import load_yaml

# Fields of a config that are dataclasses of settings themselves.
GROUPS = ("benchmark_settings", "trainer", "method_settings")
# Settings that come first in files and commands; committed runs have this order.
FIRST = (
    *("benchmark", "method", "preset", "recipe", "seed", "device", "precision", "network"),
    *("norm_statistics", "network_bias", "samples"),
)
# Names that other packages use, with our names for these settings.
SYNONYMS = {"learning_rate": "lr", "batch_size": "batch", "cuda": "device", "gpu": "device", "dtype": "precision"}

Precision = Literal["float32", "bfloat16"]
T = TypeVar("T")


@dataclass(frozen=True)
class SupervisedSettings(Settings):
    """Training of each task, on the cross-entropy of the task's own head."""

    norm_statistics: Literal["batch", "stored", "mixed"] = "batch"
    """Statistics that BatchNorm uses in evaluations: those of the batch, as published; stored ones of the training
    data; or both together, in which the stored ones count as 192 images."""
    network_bias: bool = True
    """Whether the layers of an MLP have biases."""
    samples: int | None = setting(None, low=2)
    """Maximum number of training, validation and test examples of each task, for a quick try; without it, all."""
    epochs: int = setting(200, low=1)
    """Maximum number of passes over a task's training data."""
    batch: int = setting(64, low=1)
    """Examples per training step."""
    test_batch: int = setting(64, low=1)
    """Examples per step of an evaluation; with BatchNorm on batch statistics the accuracy depends on it."""
    lr: float = setting(0.05, above=0)
    """Learning rate at the start of each task."""
    head_lr: float | None = setting(None, above=0)
    """Learning rate of the heads; without it, that of the other layers. The schedule scales both alike."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimizer of torch without options, created again for each task; adamw has torch's weight decay of 0.01."""
    schedule: Literal["patience", "constant", "cosine", "linear"] = "patience"
    """Learning rate schedule. patience: divide the learning rate when the validation loss stalls, and keep the best
    weights; the other schedules keep the last weights, and cosine and linear end at 0."""
    lr_min: float = setting(5e-5, above=0, high=math.inf)
    """patience: learning rate below which the task ends."""
    lr_factor: float = setting(2.0, above=1, high=math.inf)
    """patience: divisor of the learning rate."""
    patience: int = setting(6, low=1)
    """patience: epochs to wait for a lower validation loss."""
    average: float = setting(0.0, low=0, below=1)
    """Decay of the exponential moving average (EMA) of the weights over steps, which is evaluated and kept; 0 keeps
    the weights themselves."""
    interpolation_weight: float = setting(0.0, low=0, below=1)
    """Weight of the previous task's weights in an interpolation with the averaged ones; needs average. The first task
    and the heads of single tasks are not interpolated."""
    realign: bool = False
    """Fit the heads of earlier tasks, after each task, to the answers that they gave to its examples before it, so
    that they follow the features."""

    def __post_init__(self) -> None:
        """Check the fields, and that weight averaging goes with the schedule."""
        super().__post_init__()
        if self.interpolation_weight and not self.average:
            raise ValueError("interpolation_weight needs average: set average above 0, or interpolation_weight to 0")
        if self.average and self.schedule == "patience":
            raise ValueError(
                "average goes with schedule=constant, cosine or linear: patience keeps the best weights, not averages"
            )


@dataclass(frozen=True)
class Config(Generic[T]):
    """Config of a run.

    Attributes:
        benchmark_settings: Settings of the benchmark, of its own dataclass.
        trainer: Settings of the trainer: `SupervisedSettings`, or `PPOSettings` for a benchmark of games.
        method_settings: Settings of the method, of its own dataclass.
    """

    benchmark: str
    """One of `sgp list benchmarks`."""
    method: str
    """One of `sgp list methods`."""
    preset: Preset
    """Settings of the paper's text, of the published code (reference), or of both with their mistakes fixed
    (corrected)."""
    recipe: Recipe
    """Training schedule: the paper's, or fast, which has fewer epochs, a cosine schedule and weight averaging."""
    benchmark_settings: Any
    trainer: T
    method_settings: Any
    seed: int = setting(0, low=0, high=MAX_SEED)
    """Seed of the weights, the batch order, dropout, games and everything else that is random."""
    device: str = "cpu"
    """Torch device to train on, such as cuda, cuda:1 or mps."""
    precision: Precision = "float32"
    """Precision of training and evaluation; bfloat16 is autocast, with weights in float32."""
    network: str = "mlp"
    """One of `sgp list networks`."""
    threads: int = setting(0, low=0)
    """Threads of torch and of games; 0 is torch's own number. Another number may change the last bits."""
    channels_last: bool = True
    """Whether images and filters have the memory format channels_last, which is faster on a CPU."""

    def __post_init__(self) -> None:
        """Validate the config, which needs no network, no data and no device."""
        validate_fields(self)
        if not re.fullmatch(r"[a-z]\w*(:\d+)?", self.device):
            raise ValueError(f"device must be a torch device such as cpu, cuda or cuda:1, got {self.device!r}")
        NETWORKS[self.network]  # raises if the name is unknown
        if isinstance(self.trainer, SupervisedSettings):
            self._validate_shape()
            self._validate_training(self.trainer)
        elif isinstance(self.trainer, PPOSettings) and self.trainer.optimizer == "adam-on-projected":
            self._validate_projected_gradients()

    def _validate_shape(self) -> None:
        """Check that the network accepts the benchmark's inputs, if both are known before the data are read."""
        benchmark, shapes = BENCHMARKS[self.benchmark], NETWORKS[self.network].shapes
        if not shapes or not isinstance(benchmark, Benchmark) or benchmark.shape is None:
            return
        inputs, _ = benchmark.shape(self.benchmark_settings)
        if tuple(inputs) not in shapes:
            fitting = [name for name in NETWORKS if tuple(inputs) in NETWORKS[name].shapes]
            raise ValueError(
                f"{self.network} takes inputs of shape {' or '.join(map(str, shapes))}, but those of {self.benchmark} "
                f"are {tuple(inputs)}: use network={' or '.join(fitting or [benchmark.network])}"
            )

    def _validate_training(self, trainer: SupervisedSettings) -> None:
        """Check that the method and the benchmark support the settings of the supervised trainer."""
        facts = METHODS.facts(self.method)
        for name, off in (("interpolation_weight", "0"), ("realign", "False")):
            if getattr(trainer, name) and facts.supervised_only:
                raise ValueError(
                    f"{name} needs a method that only acts on steps, but {self.method} also changes the loss, the "
                    f"batch or the forward pass: set {name} to {off}"
                )
        if trainer.realign and facts.rounds_weights:
            raise ValueError(f"realign does not go with {self.method}, which rounds the weights: set realign to False")
        if trainer.average and self._is_projecting_rarely:
            raise ValueError("project_every goes with average=0, since the average would include unprojected steps")
        if trainer.schedule == "patience" and getattr(self.benchmark_settings, "validation", 1) == 0:
            raise ValueError("schedule=patience needs validation examples: set validation above 0, or another schedule")

    def _validate_projected_gradients(self) -> None:
        if not METHODS.facts(self.method).projects_steps:
            raise ValueError(
                f"optimizer=adam-on-projected: {self.method} projects no steps, so it cannot project gradients in "
                "their place: use optimizer=adam-gp"
            )
        if self._is_projecting_rarely:
            raise ValueError("optimizer=adam-on-projected projects every gradient: set project_every to 1")

    @property
    def _is_projecting_rarely(self) -> bool:
        return getattr(self.method_settings, "project_every", 1) > 1

    @property
    def is_game(self) -> bool:
        """Whether the tasks are games, which an agent plays."""
        return isinstance(self.trainer, PPOSettings)

    @property
    def name(self) -> str:
        """Default name of the run's folder."""
        parts = [self.benchmark, self.method, self.preset, *([self.recipe] if self.recipe != "paper" else [])]
        order = getattr(self.benchmark_settings, "order", 0)
        return "-".join([*parts, *([f"order{order}"] if order else []), f"seed{self.seed}"])

    def flat(self) -> dict[str, Any]:
        """Return every setting by its name, as on the command line."""
        groups = (self, self.benchmark_settings, self.trainer, self.method_settings)
        values = {name: getattr(group, name) for group in groups for name in _list_names(type(group))}
        return {name: values[name] for name in sorted(values, key=lambda name: name not in FIRST)}


# Names of the settings that determine which other settings exist.
CHOICES = ("benchmark", "method", "preset", "recipe")


def configure(
    benchmark: str, method: str, preset: str = "paper", recipe: str = "paper", **overrides: Any
) -> Config[Any]:
    """Build the config of a method on a benchmark: the paper's settings, changed by preset, recipe and overrides.

    Raises:
        ValueError: A name is unknown or a value is not accepted; the message says what is.
    """
    return _configure(benchmark, method, preset, recipe, overrides, settings)


def find_groups(benchmark: str, method: str) -> dict[str, type[Any]]:
    """Return the dataclasses of the settings of a method on a benchmark: the config and its groups.

    Raises:
        ValueError: A name is unknown, the method cannot learn the benchmark, or two settings have one name.
    """
    trainer: type[SupervisedSettings | PPOSettings] = SupervisedSettings
    if isinstance(BENCHMARKS[benchmark], GameBenchmark):
        _check_plays_games(benchmark, method)
        trainer = PPOSettings
    groups = {
        "config": Config,
        "benchmark_settings": BENCHMARKS[benchmark].settings,
        "trainer": trainer,
        "method_settings": METHODS.facts(method).Settings,
    }
    names = [name for group in groups.values() for name in _list_names(group)]
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        raise ValueError(f"{method} on {benchmark} has two settings called {' and '.join(sorted(duplicates))}")
    return groups


def _configure(
    benchmark: str,
    method: str,
    preset: str,
    recipe: str,
    overrides: Mapping[str, Any],
    find_usual: Callable[[str, str, str, str], Mapping[str, Any]],
) -> Config[Any]:
    """Build a config from overrides, usual values and the settings' defaults, in this order of precedence."""
    groups = find_groups(benchmark, method)
    for name, value, accepted in (("preset", preset, Preset), ("recipe", recipe, Recipe)):
        convert(name, value, accepted)
    if not has_recipe(benchmark, recipe):
        raise ValueError(f"there is no recipe {recipe!r} for {benchmark}: leave it out, or set it to paper")
    choices = {"benchmark": benchmark, "method": method, "preset": preset, "recipe": recipe}
    known = {name for group in groups.values() for name in _list_names(group)} - set(CHOICES)
    for name in overrides:
        if name not in known:
            raise ValueError(explain_unknown_setting(name, benchmark, method, known))
    # Benchmarks of other packages have no file among the paper's settings.
    given = {"network": BENCHMARKS[benchmark].network, **find_usual(benchmark, method, preset, recipe), **overrides}
    built = {name: _convert_fields(group, given | choices) for name, group in groups.items()}
    return Config(**{name: groups[name](**built[name]) for name in GROUPS}, **built["config"])


def explain_unknown_setting(
    name: str, benchmark: str, method: str, known: Iterable[str], write: Callable[[str], str] = str
) -> str:
    """Return an error message for a setting that a method on a benchmark does not have.

    The message names the methods, benchmarks and trainers that have the setting, or the nearest known names.

    Args:
        name: Name of the setting.
        benchmark: Name of the benchmark.
        method: Name of the method.
        known: Names of the existing settings.
        write: Function that writes a name as users type it, such as "--lr".
    """
    subject = f"{method} on {benchmark} has no setting {write(name)}"
    owners = find_owners(name)
    if owners:
        return f"{subject}; it is a setting of {owners}"
    near = find_near_settings(name, known)
    if near:
        return f"{subject}: did you mean {' or '.join(map(write, near))}?"
    return f"{subject}: `sgp run {benchmark} --method {method} --help` lists its settings"


def find_near_settings(name: str, known: Iterable[str]) -> list[str]:
    """Return the known settings with a similar name, or whose name in other packages is similar."""
    names = {each: each for each in known}
    names |= {synonym: target for synonym, target in SYNONYMS.items() if target in names}
    found = [name] if name in names else get_close_matches(name, names, n=2, cutoff=0.55)
    return list(dict.fromkeys(names[each] for each in found))


def find_owners(name: str) -> str:
    """Return a phrase that lists the methods, benchmarks or trainers that have a setting; empty if none has it."""
    methods = [each for each in METHODS if name in _list_names(METHODS.facts(each).Settings)]
    benchmarks = [each for each in BENCHMARKS if name in _list_names(BENCHMARKS[each].settings)]
    kinds = {"supervised training": SupervisedSettings, "training on games": PPOSettings}
    trainers = [each for each, kind in kinds.items() if name in _list_names(kind)]
    owners = [_join("the method", methods), _join("the benchmark", benchmarks), " and ".join(trainers)]
    return " and of ".join(owner for owner in owners if owner)


def _join(noun: str, names: list[str]) -> str:
    if not names:
        return ""
    return f"{noun}{'s' * (len(names) > 1)} {', '.join(names[:-1])}{' and ' * (len(names) > 1)}{names[-1]}"


def from_file(path: Path, **overrides: Any) -> Config[Any]:
    """Build the config of a YAML file of flat names; overrides replace its values.

    Raises:
        ValueError: The file is not such a mapping, lacks benchmark or method, or has an unknown name or value.
    """
    return configure(**check_complete(path, read_yaml(path) | overrides))


def read_recorded(path: Path) -> Config[Any]:
    """Read the config of a run from the file in its folder.

    A setting that the file lacks is newer than the run. It gets its default, whatever the paper's settings are now.

    Raises:
        ValueError: As for `from_file`.
    """
    values = check_complete(path, {"preset": "paper", "recipe": "paper"} | read_yaml(path))
    benchmark, method, preset, recipe = (values.pop(name) for name in CHOICES)
    return _configure(benchmark, method, preset, recipe, values, find_usual=lambda *_: {})


def check_complete(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config file, or raise a ValueError if it lacks the benchmark or the method."""
    missing = [name for name in ("benchmark", "method") if name not in values]
    if missing:
        raise ValueError(f"{path} does not say which {' and '.join(missing)}")
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the flat names and values of a config file."""
    content = load_yaml(path)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path} must have names and values, such as `benchmark: digits`")
    return content


def as_yaml(config: Config[Any]) -> str:
    """Return the text of a file from which `from_file` builds the same config."""
    import yaml

    text: str = yaml.safe_dump(config.flat(), sort_keys=False)
    return text


def as_command(config: Config[Any]) -> str:
    """Return the shortest `sgp run` command with the same config: it names only differences to the paper's settings."""
    usual = configure(config.benchmark, config.method, config.preset, config.recipe).flat()
    usual |= {"preset": "paper", "recipe": "paper"}
    words = ["sgp", "run", config.benchmark, "--method", config.method]
    for name, value in config.flat().items():
        if value == usual[name]:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict):
            words += [f"--{flag}", *(str(word) for pair in value.items() for word in pair)]
        else:
            words += [f"--{flag}", str(value)]
    return shlex.join(words)


def is_whole(config: Config[Any]) -> bool:
    """Return whether a run trains on all data of the paper's runs, so its results can be compared with the paper's."""
    ours, whole = config.flat(), configure(config.benchmark, config.method, config.preset).flat()
    required = {name: whole.get(name) for name in ("tasks", "epochs", "samples")}
    required |= comparison(config.benchmark, config.method).settings
    return all(ours.get(name) == value for name, value in required.items())


def find_differences(one: Config[Any], other: Config[Any]) -> Iterator[str]:
    """Yield each setting in which two configs differ, as `name: this, not that`."""
    ours, theirs = one.flat(), other.flat()
    for name in ours | theirs:
        this, that = (values.get(name, "nothing") for values in (ours, theirs))
        if this != that:
            yield f"{name}: {this}, not {that}"


def _check_plays_games(benchmark: str, method: str) -> None:
    """Raise if a method cannot learn games: PPO calls no method for a loss, a batch or a forward pass."""
    if METHODS.facts(method).supervised_only:
        able = [name for name in METHODS if not METHODS.facts(name).supervised_only]
        raise ValueError(
            f"{method} cannot learn {benchmark}: it changes the loss, the batch or the forward pass, which only "
            f"supervised training allows; methods for games are {', '.join(able)}"
        )


def _list_names(kind: type[Any]) -> list[str]:
    return [entry.name for entry in dataclasses.fields(kind) if entry.name not in GROUPS]


def _convert_fields(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a dataclass has fields for, each converted to the field's type."""
    hints = get_type_hints(kind)
    return {name: convert(name, values[name], hints[name]) for name in _list_names(kind) if name in values}
