"""Arguments of the subcommands: each option is a field of a dataclass, and its help is the field's docstring.

The type of a field converts its value. The help shows values as a user types them, and fits 80 columns.
"""

from __future__ import annotations

import ast
import inspect
import shutil
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, field, fields
from functools import cache
from pathlib import Path
from textwrap import dedent, fill
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from sgp.registry import unknown
from sgp.settings import RANGE, convert, find_options

# Keys of a field's metadata.
METAVAR, FLAG = "metavar", "flag"
# Column of the help at which descriptions begin, and its total width.
LEFT, WIDTH = 28, 80
PLACEHOLDERS = {int: "N", float: "X", Path: "PATH", NoneType: "none"}
T = TypeVar("T")


class Exit(Exception):  # noqa: N818 (also raised after help)
    """Raised to end the command.

    Args:
        code: Exit code.
        message: Error message; empty if there is none.
    """

    def __init__(self, code: int, message: str = "") -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def exit_on(*errors: type[Exception], code: int = 2) -> Iterator[None]:
    """End the command with the message of an error that is raised inside the context."""
    try:
        yield
    except errors as error:
        raise Exit(code, str(error)) from error


def positional(metavar: str, default: Any = MISSING) -> Any:
    """Return a dataclass field for a positional argument.

    Args:
        metavar: Name of the argument in help and errors.
        default: Default value; without one, the argument is required.
    """
    return field(default=default, metadata={METAVAR: metavar})


def flag() -> Any:
    """Return a dataclass field for a boolean option that is off by default and has no ``--no-`` form."""
    return field(default=False, metadata={FLAG: True})


class Parser(ArgumentParser):
    """Argument parser for the fields of dataclasses, which raises exceptions instead of ending the process.

    Args:
        usage: Command with its arguments.
        description: What the command does, in paragraphs.

    Attributes:
        hints: Type of each argument by the name of its field.
    """

    def __init__(self, usage: str = "", description: str = "") -> None:
        width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
        super().__init__(
            usage=usage,
            description="\n\n".join(fill(" ".join(each.split()), width) for each in description.split("\n\n")),
            formatter_class=lambda prog: RawDescriptionHelpFormatter(prog, max_help_position=LEFT, width=width),
            add_help=False,
            allow_abbrev=False,
            argument_default=SUPPRESS,
        )
        self.hints: dict[str, Any] = {}

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError instead of ending the process."""
        raise ValueError(message)

    def add_fields(
        self, heading: str, kind: type[Any], values: Mapping[str, Any] | None, leave_out: Sequence[str] = ()
    ) -> None:
        """Add the fields of a dataclass as arguments.

        Args:
            heading: Heading of the arguments in the help.
            kind: Dataclass.
            values: Default value of each argument, for the help; None if the help is not printed.
            leave_out: Names of fields that are not arguments.
        """
        group, hints = self.add_argument_group(heading), get_type_hints(kind)
        docs = {} if values is None else read_docs(kind)  # type: ignore[arg-type]  # classes are hashable
        for entry in fields(kind):
            if entry.name in leave_out:
                continue
            hint, value = hints[entry.name], (values or {}).get(entry.name)
            self.hints[entry.name] = hint
            text = _describe(entry, hint, docs.get(entry.name, ""), value).replace("%", "%%")
            if METAVAR in entry.metadata:
                many, some = ("+", None) if entry.default is MISSING else ("*", "?")
                nargs = many if get_origin(hint) is tuple else some
                group.add_argument(entry.name, metavar=entry.metadata[METAVAR], nargs=nargs, help=text)
            else:
                options = _choose_action(entry, hint, value)
                group.add_argument(write_option(entry.name), dest=entry.name, help=text, **options)

    def parse(self, arguments: Sequence[str], explain: Callable[[str], str] | None = None) -> dict[str, Any]:
        """Parse arguments, and return their values by the name of their field. Omitted arguments are left out.

        Args:
            arguments: Words of the command line.
            explain: Function that returns the error message for an unknown option; by default the message suggests the
                nearest options.

        Raises:
            ValueError: An argument is unknown, missing or not accepted.
        """
        words = [_spell_option(word) if word.startswith("--") else word for word in arguments]
        given, rest = self.parse_known_intermixed_args(words)
        options = [word.partition("=")[0] for word in rest if word.startswith("-")]
        if options and explain is not None:
            raise ValueError(explain(options[0]))
        if options:
            raise ValueError(unknown("option", options[0], map(write_option, self.hints)))
        if rest:
            hint = f": did you mean {write_option(rest[0])}?" if rest[0] in self.hints else ""
            raise ValueError(f"unexpected argument {rest[0]!r}{hint}")
        return {name: _convert_words(name, words, self.hints[name]) for name, words in vars(given).items()}


def write_option(name: str) -> str:
    """Return a setting as an option: "test_batch" is --test-batch."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def _spell_option(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _takes_pairs(hint: Any) -> bool:
    return any(get_origin(each) is dict for each in find_options(hint))


def _choose_action(entry: Field[Any], hint: Any, value: Any) -> dict[str, Any]:
    """Return the keywords of ``add_argument`` by which an option is a flag, takes one or several words, or repeats."""
    if hint is bool:
        return {"action": "store_true" if FLAG in entry.metadata else BooleanOptionalAction}
    item = get_args(hint)[0] if get_origin(hint) is tuple else hint
    # The help does not show "none" as a choice where it is the default.
    types = [each for each in find_options(item) if each is not NoneType or value is not None]
    names = [str(name) for each in types for name in _list_placeholders(entry.name, each)]
    if _takes_pairs(hint):
        (value_type,) = {get_args(each)[1] for each in types if get_origin(each) is dict}
        return {"nargs": "+", "metavar": ("|".join(names), PLACEHOLDERS[value_type])}
    return {"action": "append" if item is not hint else "store", "metavar": "|".join(names)}


def _list_placeholders(name: str, kind: Any) -> Sequence[Any]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return ["PATTERN" if get_origin(kind) is dict else PLACEHOLDERS.get(kind, name.upper())]


def _convert_words(name: str, words: Any, hint: Any) -> Any:
    if get_origin(hint) is tuple:
        return tuple(convert(write_option(name), word, get_args(hint)[0]) for word in words)
    if _takes_pairs(hint):
        pairs = dict(zip(words[::2], words[1::2], strict=False))
        words = words[0] if len(words) == 1 else pairs if len(words) % 2 == 0 else " ".join(words)
    return convert(write_option(name), words, hint)


def _describe(entry: Field[Any], hint: Any, text: str, value: Any) -> str:
    """Return the help of an argument: its docstring, its range and its value, unless that is None or empty."""
    parts = [text]
    if RANGE in entry.metadata:
        limits = entry.metadata[RANGE].describe(whole=float not in find_options(hint))
        limits = limits.removesuffix("finite").removesuffix(" and ")
        parts += [f"{limits[0].upper()}{limits[1:]}."] if limits else []
    if value not in (None, "", (), MISSING) and FLAG not in entry.metadata:
        parts.append(f"Default: {_format_value(value)}.")
    return " ".join(parts)


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return " ".join(f"{pattern} {_format_value(item)}" for pattern, item in value.items())
    if isinstance(value, int) and value >= 10_000:
        return f"{value:_}"
    return f"{value:g}" if isinstance(value, float) else str(value)


@cache
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
    """Return whether the arguments ask for the help."""
    return "-h" in arguments or "--help" in arguments


def parse_into(kind: type[T], usage: str, arguments: Sequence[str]) -> T:
    """Build a dataclass whose fields are the arguments of a command, or print its help.

    Args:
        kind: Dataclass; its docstring describes the command.
        usage: Command with its arguments.
        arguments: Words of the command line. If there are none, a command with a required argument prints its help.

    Raises:
        Exit: The help was printed, or an argument is not accepted.
    """
    defaults = {entry.name: entry.default for entry in fields(kind)}  # type: ignore[arg-type]
    parser = Parser(usage, inspect.getdoc(kind) or "")
    wants_help = asks_for_help(arguments) or (not arguments and MISSING in defaults.values())
    parser.add_fields("options", kind, defaults if wants_help else None)
    if wants_help:
        parser.print_help()
        raise Exit(0)
    with exit_on(ValueError):
        return kind(**parser.parse(arguments))
