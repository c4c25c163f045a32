"""What is wrong with a configuration, gathered before it is raised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """One broken rule.

    Attributes:
        options: dotted names of the options involved; a rule is not reported when one of them is itself invalid.
        message: the rule, the values and the remedy, naming every option involved.
    """

    options: tuple[str, ...]
    message: str


class ConfigError(ValueError):
    """A configuration that cannot run. The message lists every violation, one per line.

    Args:
        violations: what is wrong; a text stands for a violation that is filed under no option.
    """

    def __init__(self, violations: Sequence[Violation | str]) -> None:
        self.violations = tuple(Violation((), entry) if isinstance(entry, str) else entry for entry in violations)
        count = len(self.violations)
        lines = [f"{count} problem{'s' if count != 1 else ''} in the configuration:"]
        super().__init__("\n".join(lines + [f"- {violation.message}" for violation in self.violations]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Violation, ...]]]:
        return type(self), (self.violations,)
