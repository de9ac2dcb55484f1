"""One line of the table."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """Measured amounts, their ratio and its goal.

    Attributes:
        name: what was measured.
        unit: "s" or "bytes", of the amounts.
        amounts: the medians by way: "plain", "sgp", "published"; one that does not apply is missing.
        against: which way `ratio` divides by.
        ratio: sgp / against.
        published_ratio: published / against.
        goal: what the ratio should not exceed; None where nothing was promised.
        note: a line below the table.
        detail: what else a reader of the JSON wants to know: ranks, modes, every round.
    """

    name: str
    unit: str
    amounts: dict[str, float]
    against: str
    ratio: float
    published_ratio: float | None = None
    goal: float | None = None
    note: str = ""
    detail: dict[str, object] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached; None without a goal."""
        return None if self.goal is None else self.ratio <= self.goal


def as_ratio(value: float | None) -> str:
    """In a table: small ones as fractions, nothing where there is none."""
    if value is None:
        return ""
    return f"1/{1 / value:.0f}" if value < 0.2 else f"{value:.2f}"
