"""Arguments of the subcommands: options are the fields of dataclasses, and their help is the fields' docstrings.

A value is converted by the field's type. Help shows values as a user types them, and fits 80 columns.
"""

from __future__ import annotations

import ast
import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from textwrap import dedent, fill
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from sgp.registry import unknown
from sgp.settings import RANGE, Range, find_options

# Keys of a field's metadata.
METAVAR, FLAG = "metavar", "flag"
# Columns of the help: of the descriptions, and in all.
LEFT, WIDTH = 28, 80
PLACEHOLDERS = {int: "N", float: "X", Path: "PATH"}
TYPES = {int: "a whole number", float: "a number", NoneType: "none", str: "a text", Path: "a path"}
T = TypeVar("T")


class ArgumentError(ValueError):
    """An argument is unknown, missing or not accepted; the message says what is accepted."""


def positional(metavar: str, default: Any = MISSING) -> Any:
    """Return a dataclass field for an argument that has no option in front of it.

    Args:
        metavar: Name of the argument in help and errors.
        default: Value without the argument; if there is none, the argument is required.
    """
    return field(default=default, metadata={METAVAR: metavar})


def flag() -> Any:
    """Return a dataclass field for an option that is false by default and has no opposite."""
    return field(default=False, metadata={FLAG: True})


@dataclass(frozen=True)
class Option:
    """Field of a dataclass as an argument.

    Attributes:
        name: Name of the field.
        hint: Type of the field.
        entry: Field itself.
        doc: Docstring of the field.
    """

    name: str
    hint: Any
    entry: Field[Any]
    doc: str

    @property
    def metavar(self) -> str | None:
        """Name of an argument that has no option in front of it; None for an option."""
        return self.entry.metadata.get(METAVAR)

    @property
    def flag(self) -> str:
        """Name on the command line."""
        return self.metavar or f"--{self.name.rstrip('_').replace('_', '-')}"

    @property
    def is_flag(self) -> bool:
        """Whether the option takes no value."""
        return self.hint is bool

    @property
    def has_opposite(self) -> bool:
        """Whether the option has a form `--no-...`."""
        return self.is_flag and FLAG not in self.entry.metadata

    @property
    def is_repeated(self) -> bool:
        """Whether the argument can be given several times."""
        return get_origin(self.hint) is tuple

    @property
    def types(self) -> tuple[Any, ...]:
        """Types of one value, in the order in which they are tried."""
        return find_options(get_args(self.hint)[0] if self.is_repeated else self.hint)

    @property
    def takes_pairs(self) -> bool:
        """Whether the option accepts pairs of a pattern and a value."""
        return any(get_origin(each) is dict for each in self.types)

    def convert(self, words: Sequence[str]) -> Any:
        """Convert the words of one value to the first type that accepts them.

        Raises:
            ArgumentError: No type accepts them.
        """
        for each in self.types:
            try:
                return _convert(words, each)
            except (ValueError, KeyError):
                continue
        accepted = " or ".join(map(_describe_type, self.types))
        raise ArgumentError(f"{self.flag} must be {accepted}, got {' '.join(words)!r}")

    def describe_usage(self, value: Any = None) -> str:
        """Return the argument with a placeholder for its value: "--lr X", "--bias protect|freeze".

        Args:
            value: Value without the argument. If it is None, the help does not mention that none is accepted.
        """
        if self.metavar is not None:
            return self.metavar
        if self.is_flag:
            return f"--[no-]{self.flag[2:]}" if self.has_opposite else self.flag
        types = [each for each in self.types if each is not NoneType or value is not None]
        return f"{self.flag} {'|'.join(map(self._describe_placeholder, types))}"

    def _describe_placeholder(self, kind: Any) -> str:
        if get_origin(kind) is Literal:
            return "|".join(map(str, get_args(kind)))
        if get_origin(kind) is dict:
            return f"PATTERN {PLACEHOLDERS[get_args(kind)[1]]} ..."
        return {NoneType: "none", str: self.name.upper()}.get(kind) or PLACEHOLDERS[kind]

    def describe(self, value: Any) -> str:
        """Return the help of the argument: its docstring, its range and its value.

        Args:
            value: Value without the argument; none is mentioned if it is None, empty or false.
        """
        accepted: Range | None = self.entry.metadata.get(RANGE)
        parts = [self.doc]
        if accepted is not None:
            limits = accepted.describe(whole=float not in self.types).removesuffix("finite").removesuffix(" and ")
            parts += [f"{limits[0].upper()}{limits[1:]}."] if limits else []
        if self.has_opposite or (value not in (None, "", (), MISSING) and not self.is_flag):
            parts.append(f"Default: {_describe_value(value)}.")
        return " ".join(parts)


def _convert(words: Sequence[str], kind: Any) -> Any:
    if get_origin(kind) is dict:
        if len(words) % 2:
            raise ValueError
        item = get_args(kind)[1]
        return {pattern: _convert([word], item) for pattern, word in zip(words[::2], words[1::2], strict=True)}
    (word,) = words
    if get_origin(kind) is Literal:
        return {str(choice): choice for choice in get_args(kind)}[word]
    if kind is NoneType:
        return {"none": None}[word.lower()]
    return kind(word)


def _describe_type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is dict:
        return f"pairs of a pattern and {TYPES[get_args(kind)[1]]}"
    return TYPES[kind]


def _describe_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return " ".join(f"{pattern} {_describe_value(item)}" for pattern, item in value.items())
    if isinstance(value, int) and value >= 10_000:
        return f"{value:_}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def list_options(kind: type[Any], leave_out: Sequence[str] = ()) -> list[Option]:
    """Return the fields of a dataclass as arguments.

    Args:
        kind: Dataclass.
        leave_out: Names of fields that are no arguments.
    """
    hints, docs = get_type_hints(kind), read_docs(kind)
    chosen = [entry for entry in fields(kind) if entry.name not in leave_out]
    return [Option(entry.name, hints[entry.name], entry, docs.get(entry.name, "")) for entry in chosen]


def read_docs(kind: type[Any]) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, on one line."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            (class_,) = ast.parse(dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError):  # a class without source has no help
            continue
        assert isinstance(class_, ast.ClassDef)
        for node, following in zip(class_.body, class_.body[1:], strict=False):
            match node, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether the help is asked for."""
    return "-h" in arguments or "--help" in arguments


def parse(
    options: Sequence[Option], arguments: Sequence[str], explain: Callable[[str], str] | None = None
) -> dict[str, Any]:
    """Parse arguments to values by the name of their field. Arguments that are not given are left out.

    Args:
        options: Accepted arguments.
        arguments: Words of the command line.
        explain: Function that returns the error message for an unknown option, from its name without hyphens; by
            default the message has the nearest options.

    Raises:
        ArgumentError: An argument is unknown, missing or not accepted.
    """
    named = {option.flag: (option, True) for option in options if option.metavar is None}
    named |= {f"--no-{option.flag[2:]}": (option, False) for option in options if option.has_opposite}
    unfilled = [option for option in options if option.metavar is not None]
    values: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            name = name.replace("_", "-")
            if not word.startswith("--"):
                raise ArgumentError(f"there is no option {word!r}: options begin with --")
            if name not in named:
                raise ArgumentError(
                    explain(name.lstrip("-").replace("-", "_")) if explain else unknown("option", name, named)
                )
            option, is_on = named[name]
            if option.is_flag:
                if equals:
                    raise ArgumentError(f"{name} takes no value, got {value!r}")
                values[option.name] = is_on
                continue
            taken = [value] if equals else _take_words(option, words)
        elif unfilled:
            option, taken = unfilled[0], [word]
            if not option.is_repeated:
                del unfilled[0]
        else:
            hint = f": did you mean --{word}?" if f"--{word}" in named else ""
            raise ArgumentError(f"unexpected argument {word!r}{hint}")
        converted = option.convert(taken)
        values[option.name] = (*values.get(option.name, ()), converted) if option.is_repeated else converted
    for option in unfilled:
        if option.entry.default is MISSING and option.name not in values:
            raise ArgumentError(f"{option.flag.removesuffix(' ...')} is missing")
    return values


def _take_words(option: Option, words: list[str]) -> list[str]:
    """Remove the words of an option's value from the front of those that are left."""
    count = 0
    while count < len(words) and not words[count].startswith("--") and (option.takes_pairs or count == 0):
        count += 1
    if count == 0:
        raise ArgumentError(f"{option.flag} needs a value")
    taken, words[:count] = words[:count], []
    return taken


def parse_into(kind: type[T], arguments: Sequence[str]) -> T:
    """Build a dataclass whose fields are the arguments of a command.

    Raises:
        ValueError: An argument is not accepted.
    """
    return kind(**parse(list_options(kind), arguments))


def print_command_help(kind: type[Any], usage: str) -> None:
    """Print the help of a command whose arguments are the fields of a dataclass.

    Args:
        kind: Dataclass; its docstring describes the command.
        usage: Command with its arguments.
    """
    options = list_options(kind)
    defaults = {option.name: option.entry.default for option in options}
    print(format_help(usage, inspect.getdoc(kind) or "", {"options": options}, defaults))


def format_help(usage: str, description: str, groups: Mapping[str, Sequence[Option]], values: Mapping[str, Any]) -> str:
    """Return the help of a command.

    Args:
        usage: Command with its arguments.
        description: What the command does, in paragraphs.
        groups: Arguments by the heading of their group.
        values: Value of each argument that is not given.
    """
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    paragraphs = [fill(" ".join(each.split()), width) for each in description.split("\n\n")]
    sections = [f"usage: {usage}", *paragraphs]
    for heading, options in groups.items():
        if options:
            entries = [_format_entry(option, values.get(option.name), width) for option in options]
            sections.append("\n".join([f"{heading}:", *entries]))
    return "\n\n".join(sections)


def _format_entry(option: Option, value: Any, width: int) -> str:
    """Return the help of one argument: its name on the left, and its description beside or below it."""
    usage = f"  {option.describe_usage(value)}"
    indent = LEFT * " "
    lines = fill(option.describe(value), width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(usage) > LEFT - 2:
        wrapped = fill(usage, width, subsequent_indent=6 * " ", break_on_hyphens=False, break_long_words=False)
        return f"{wrapped}\n{lines}"
    return usage + lines[len(usage) :]
