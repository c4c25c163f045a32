"""What may be shown of an address: dry run, events, log, checkpoints, errors and report pass their
texts through here; and what a terminal may be shown of any text.

Imports the standard library alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"

# From // to the last @ before a space: a password may hold @, / and : that should have been
# escaped. Addresses of a list are separated by commas, which a password may hold too.
_USER = re.compile(r"(?<=//)(?:(?!,[A-Za-z][\w+.-]*://)\S)*@")
_QUERY = re.compile(
    r"(?i)(?<=[?&])([^=&\s]*(?:token|key|passw|secret|sig|auth)[^=&\s]*)=(?:(?!,[a-z][\w+.-]*://)[^&\s\"'])+"
)
_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def redact(text: str) -> str:
    """The text with user and password of every address, and what its query has under names like
    ``token``, hidden."""
    if "//" not in text:
        return text
    return _QUERY.sub(rf"\1={HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


def redacted(value: Any) -> Any:
    """The same for every text in plain values, those in lists and maps too."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redacted(inner) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return [redacted(inner) for inner in value]
    return value


def lacks_a_secret(value: Any) -> bool:
    """Whether this is a text that ``redact`` has shortened."""
    return isinstance(value, str) and (f"{HIDDEN}@" in value or f"={HIDDEN}" in value)


def printable(text: str) -> str:
    """The text with characters that a terminal obeys (ESC, a return, marks of direction) as
    ``\\x1b``: prompts, completions and errors of users' code may hold any. Line ends and tabs
    stay."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class RedactingFormatter(logging.Formatter):
    """For a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(redact(super().format(record)))
