"""Run the command in this process, and check its output and exit code."""

from __future__ import annotations

import contextlib
import io
import signal
from dataclasses import dataclass
from types import FrameType

import torch

from sgp.cli import main

# Seconds after which a command counts as hanging; a command takes a few seconds.
CEILING = 300


class Hang(BaseException):
    """Raised when a command does not end."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a command, or of reading a damaged file.

    Attributes:
        subject: Command, or kind of damage.
        is_accepted: Whether the command or the reading succeeded.
        fault: Violation of the promised behaviour; empty if there is none.
        message: Errors that were printed.
    """

    subject: str
    is_accepted: bool
    fault: str = ""
    message: str = ""


def call(arguments: list[str]) -> Outcome:
    """Run the command in this process. Every line of its errors must begin with its name or be indented."""
    output, errors = io.StringIO(), io.StringIO()
    subject = f"sgp {arguments[0]}"
    threads, before = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGALRM, _raise_hang)
    signal.alarm(CEILING)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            status = main(arguments)
    except Hang:
        return Outcome(subject, False, f"{subject} does not end")
    except Exception as error:
        return Outcome(subject, False, f"{subject}: {type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGTERM, before)
        torch.set_num_threads(threads)
    message = errors.getvalue().strip()
    unclear = [line for line in message.splitlines() if not line.startswith(("sgp ", "  "))]
    if status not in (0, 1, 2) or unclear or (status and not message):
        return Outcome(subject, False, f"{subject}: exit code {status}, {message[:400]}", message)
    return Outcome(subject, status == 0, message=message)


def _raise_hang(number: int, frame: FrameType | None) -> None:
    raise Hang
