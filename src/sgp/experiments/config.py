"""What a run is: everything that its numbers depend on, typed, as flat names and values in a file."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sgp.benchmarks import BENCHMARKS, GameBenchmark
from sgp.methods import METHODS
from sgp.networks import NETWORKS
from sgp.paper import PRESETS, RECIPES, Preset, Recipe, comparison, has_recipe, settings
from sgp.registry import unknown
from sgp.rl.settings import PPOSettings
from sgp.settings import MAX_SEED, Settings, setting, validate_fields

# Fields of a config that are dataclasses of settings themselves.
GROUPS = ("benchmark_settings", "trainer", "method_settings")


@dataclass(frozen=True)
class Flat:
    """What the configs of all kinds of runs share.

    Attributes:
        benchmark_settings: Settings of the benchmark, of its own dataclass.
        trainer: How each task is learned.
        method_settings: Settings of the method, of its own dataclass.
    """

    benchmark: str
    """One of `sgp list benchmarks`."""
    method: str
    """One of `sgp list methods`."""
    preset: Preset = "paper"
    """paper: what the text says; reference: what the published code does; corrected: what is right."""
    recipe: Recipe = "paper"
    """paper: its training; fast, where there is one: a cosine rate and averaged weights in fewer epochs."""
    seed: int = setting(0, low=0, high=MAX_SEED)
    """Of the weights, the order of batches, dropout, games and everything else that is random."""
    benchmark_settings: object = None
    trainer: object = None
    method_settings: object = None

    def __post_init__(self) -> None:
        validate_fields(self)

    def flat(self) -> dict[str, Any]:
        """Every setting by its name, as on the command line."""
        values: dict[str, Any] = {}
        for group in (self, self.benchmark_settings, self.trainer, self.method_settings):
            for entry in dataclasses.fields(group):  # type: ignore[arg-type]
                if entry.name not in GROUPS:
                    values[entry.name] = getattr(group, entry.name)
        return values


@dataclass(frozen=True)
class SupervisedSettings(Settings):
    """How each task is learned, on the cross-entropy of the task's own head."""

    epochs: int = setting(200, low=1)
    """The most passes over a task's training data."""
    batch: int = setting(64, low=1)
    """Examples per training step."""
    test_batch: int = setting(64, low=1)
    """Examples per step of an evaluation; with BatchNorm on batch statistics the accuracy depends on it."""
    lr: float = setting(0.05, above=0)
    """Learning rate at the start of each task."""
    head_lr: float | None = setting(None, above=0)
    """That of the heads, where they learn at a rate of their own; the schedule divides both alike."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Of torch, plain, made anew for each task; adamw has torch's weight decay of 0.01."""
    schedule: Literal["patience", "constant", "cosine", "linear"] = "patience"
    """patience: divide the rate when the validation loss stalls, keep the best weights. The others keep the last
    ones; cosine and linear end at 0."""
    lr_min: float = setting(5e-5, above=0, high=math.inf)
    """patience: a rate below this ends the task."""
    lr_factor: float = setting(2.0, above=1, high=math.inf)
    """patience: what the rate is divided by."""
    patience: int = setting(6, low=1)
    """patience: how many epochs without a better validation loss are waited for."""
    average: float = setting(0.0, low=0, below=1)
    """Decay of an exponential mean of the weights over steps, which is evaluated and kept; 0 keeps the weights."""
    old_share: float = setting(0.0, low=0, below=1)
    """average: how far from the mean back to the weights before the task those lie that are kept, in [0, 1). The first
    task and heads of single tasks have no weights before it."""
    realign: bool = False
    """Fit the heads of earlier tasks, after each task, to the answers that they gave to its examples before it. So they
    follow the features that it has moved."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.old_share and not self.average:
            raise ValueError("old_share goes with average: set average above 0, or old_share to 0")
        if self.average and self.schedule == "patience":
            raise ValueError("average goes with schedule=constant, cosine or linear: the best weights are no mean")


@dataclass(frozen=True)
class Config(Flat):
    """One run of supervised training."""

    network: str = "mlp"
    """One of `sgp list networks`."""
    statistics: Literal["batch", "stored", "mixed"] = "batch"
    """What BatchNorm divides by at test: statistics of the batch, as published, stored ones of the training data, or
    those of both together, in which the stored ones stand for 192 images."""
    network_bias: bool = True
    """Whether the layers of an MLP have biases."""
    samples: int | None = setting(None, low=2)
    """At most so many training, validation and test examples of each task, at least 2, for a quick look."""
    threads: int = setting(0, low=0)
    """Of torch; 0 takes what is usual here. Another number may change the last bits."""
    channels_last: bool = True
    """Memory format of images, which is faster on a CPU."""
    trainer: SupervisedSettings = field(default_factory=SupervisedSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        NETWORKS[self.network]  # refuses a name that is not there
        if self.trainer.schedule == "patience" and getattr(self.benchmark_settings, "validation", 1) == 0:
            raise ValueError("schedule=patience needs validation examples: set validation above 0, or another schedule")
        for name, off in (("old_share", "0"), ("realign", "False")):
            if getattr(self.trainer, name) and METHODS[self.method].supervised_only:
                raise ValueError(
                    f"{name} is for methods that only act on steps, and {self.method} does more: set it to {off}"
                )
        if self.trainer.realign and METHODS[self.method].rounds_weights:
            raise ValueError(f"realign is not for {self.method}, which rounds the weights that heads were fitted to")
        if self.trainer.average and getattr(self.method_settings, "project_every", 1) > 1:
            raise ValueError("project_every goes with average=0: the mean would take in steps not projected yet")

    @property
    def name(self) -> str:
        """What the run's folder is called unless the user says otherwise."""
        parts = [self.benchmark, self.method, self.preset, *([self.recipe] if self.recipe != "paper" else [])]
        order = getattr(self.benchmark_settings, "order", 0)
        return "-".join([*parts, *([f"order{order}"] if order else []), f"seed{self.seed}"])


@dataclass(frozen=True)
class GameConfig(Flat):
    """One run on a stream of games."""

    network: str = "actor-critic"
    """An agent's, of `sgp list networks`."""
    threads: int = setting(0, low=0)
    """Of torch and of the games; 0 takes what is usual here. Another number may change the last bits."""
    channels_last: bool = True
    """Memory format of observations and filters, which is faster on a CPU for large ones."""
    trainer: PPOSettings = field(default_factory=PPOSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        NETWORKS[self.network]  # refuses a name that is not there

    @property
    def name(self) -> str:
        """What the run's folder is called unless the user says otherwise."""
        return "-".join([self.benchmark, self.method, self.preset, f"seed{self.seed}"])


AnyConfig = Config | GameConfig
# What decides which other names there are.
CHOICES = ("benchmark", "method", "preset", "recipe")


def configure(benchmark: str, method: str, preset: str = "paper", recipe: str = "paper", **overrides: Any) -> AnyConfig:
    """The config of a method on a benchmark: the paper's settings, changed by preset, recipe and overrides.

    It is a GameConfig for a stream of games.

    Raises:
        ValueError: a name is unknown or a value out of range; the message has what would be accepted.
    """
    return _configure(benchmark, method, preset, recipe, overrides, settings)


def _configure(
    benchmark: str,
    method: str,
    preset: str,
    recipe: str,
    overrides: Mapping[str, Any],
    usual: Callable[[str, str, str, str], Mapping[str, Any]],
) -> AnyConfig:
    """A config of overrides, of what is usual, and of each setting's default."""
    kind: type[AnyConfig] = Config
    trainer: type[SupervisedSettings | PPOSettings] = SupervisedSettings
    if isinstance(BENCHMARKS[benchmark], GameBenchmark):
        _refuse_supervised(benchmark, method)
        kind, trainer = GameConfig, PPOSettings
    groups = {
        "benchmark_settings": BENCHMARKS[benchmark].settings,
        "trainer": trainer,
        "method_settings": METHODS[method].Settings,
    }
    _choice("preset", preset, PRESETS)
    _choice("recipe", recipe, RECIPES)
    if not has_recipe(benchmark, recipe):
        raise ValueError(f"there is no recipe {recipe!r} for {benchmark}: nobody has tried it there")
    values = dict.fromkeys(CHOICES) | {"benchmark": benchmark, "method": method, "preset": preset, "recipe": recipe}
    names = [name for group in (kind, *groups.values()) for name in _fields(group)]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{method} on {benchmark} has two settings called {' and '.join(sorted(twice))}")
    known = set(names) - set(CHOICES)
    for name in overrides:
        if name not in known:
            raise ValueError(unknown(f"setting of {method} on {benchmark}", name, known))
    # Benchmarks of other packages have no file in the paper's room.
    given = {"network": BENCHMARKS[benchmark].network, **usual(benchmark, method, preset, recipe), **overrides}
    made = {name: _build(group, given) for name, group in groups.items()}
    config: AnyConfig = _build(kind, given | values | made)
    return config


def from_file(path: Path, **overrides: Any) -> AnyConfig:
    """The config of a YAML file of flat names; overrides win.

    Raises:
        ValueError: the file is no such mapping, lacks benchmark or method, or has an unknown name or value.
    """
    return configure(**_complete(path, read_yaml(path) | overrides))


def recorded(path: Path) -> AnyConfig:
    """The config of a run, from the file that it wrote.

    A setting that the file does not have is younger than the run, which so had the setting's default, whatever the
    paper's room has for it now.

    Raises:
        ValueError: as `from_file`.
    """
    values = _complete(path, {"preset": "paper", "recipe": "paper"} | read_yaml(path))
    benchmark, method, preset, recipe = (values.pop(name) for name in CHOICES)
    return _configure(benchmark, method, preset, recipe, values, usual=lambda *_: {})


def _complete(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in ("benchmark", "method") if name not in values]
    if missing:
        raise ValueError(f"{path} does not say which {' and '.join(missing)}")
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    """The flat names and values of a config file."""
    content = load_yaml(path)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ValueError(f"{path} must have names and values, such as `benchmark: digits`")
    return content


def load_yaml(path: Path | Traversable) -> Any:
    """What a YAML file holds: plain values only, since nothing in it is executed.

    Raises:
        ValueError: it is no YAML, or has a name twice, of which YAML would take the last.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        for nodes in _mappings(node, yaml.MappingNode):
            names = [name.value for name, _ in nodes if isinstance(name, yaml.ScalarNode)]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{path} has {' and '.join(twice)} twice")
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error


def _mappings(node: Any, kind: type[Any]) -> Iterator[list[tuple[Any, Any]]]:
    """The names and values of a file's mappings, each once, wherever they stand."""
    seen, left = set(), [node]
    while left:
        node = left.pop()
        if node is None or id(node) in seen or isinstance(node.value, str):
            continue
        seen.add(id(node))
        if isinstance(node, kind):
            yield node.value
            left += [value for _, value in node.value]
        else:
            left += node.value


def as_yaml(config: AnyConfig) -> str:
    """A file from which `from_file` makes the same config."""
    import yaml

    text: str = yaml.safe_dump(config.flat(), sort_keys=False)
    return text


def as_command(config: AnyConfig) -> str:
    """The shortest `sgp run` that gives the same config: it names what differs from the paper's room."""
    usual = configure(config.benchmark, config.method, config.preset, config.recipe).flat()
    words = ["sgp", "run", config.benchmark, "--method", config.method]
    for name in ("preset", "recipe"):
        if getattr(config, name) != "paper":
            words += [f"--{name}", getattr(config, name)]
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


def is_whole(config: AnyConfig) -> bool:
    """Return whether a run trains on all data that the paper's runs do, so its numbers can stand beside the paper's."""
    ours, whole = config.flat(), configure(config.benchmark, config.method, config.preset).flat()
    required = {name: whole.get(name) for name in ("tasks", "epochs", "samples")}
    required |= comparison(config.benchmark, config.method).settings
    return all(ours.get(name) == value for name, value in required.items())


def differences(one: AnyConfig, other: AnyConfig) -> Iterator[str]:
    """What two configs differ in, as `name: this, not that`."""
    theirs = other.flat()
    for name, value in one.flat().items():
        if theirs.get(name) != value:
            yield f"{name}: {value}, not {theirs.get(name)}"
    for name in theirs.keys() - one.flat().keys():
        yield f"{name}: nothing, not {theirs[name]}"


def _refuse_supervised(benchmark: str, method: str) -> None:
    """Games are learned by PPO, which asks no method for a loss, a batch or a forward pass."""
    if METHODS[method].supervised_only:
        able = [name for name in METHODS if not METHODS[name].supervised_only]
        raise ValueError(
            f"{method} cannot learn {benchmark}: it changes the loss, the batch or the forward pass, which only "
            f"supervised training lets it; for games there are {', '.join(able)}"
        )


def _fields(kind: type[Any]) -> list[str]:
    return [entry.name for entry in dataclasses.fields(kind) if entry.name not in GROUPS]


def _choice(kind: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(unknown(kind, name, known))


def _build(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A dataclass from those of the values that it has fields for, each brought to the field's type."""
    hints = get_type_hints(kind)
    names = [entry.name for entry in dataclasses.fields(kind) if entry.name in values]
    return kind(**{name: typed(name, values[name], hints[name]) for name in names})


def typed(name: str, value: Any, wanted: Any) -> Any:
    """A value of YAML as a type asks for it: 1 is a float too, and so is "1e-5", which YAML reads as a string.

    Raises:
        ValueError: it is of another type; the message names the setting.
    """
    origin, options = get_origin(wanted), get_args(wanted)
    if wanted is object or (wanted is NoneType and value is None):
        return value
    if origin is Literal:
        if isinstance(value, bool):  # the word, which YAML takes for a truth
            value = str(value).lower()
        if value in options:
            return value
        raise ValueError(unknown(name, str(value), map(str, options)))
    if origin in (Union, UnionType):
        for option in options:
            try:
                return typed(name, value, option)
            except ValueError:
                continue
    elif origin is dict and isinstance(value, Mapping):
        return {str(key): typed(f"{name}.{key}", item, options[1]) for key, item in value.items()}
    elif wanted is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif isinstance(wanted, type) and isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool):
        return value
    kind = getattr(wanted, "__name__", None) if origin is None else None
    raise ValueError(f"{name} must be {kind or wanted}, got {value!r}")
