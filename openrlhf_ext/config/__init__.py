"""Typed options of a run: the schema, loading from YAML and command line, and every check that needs no GPU.

Imports pydantic and PyYAML only. Users of this package call :func:`load_config`; see docs/configuration.md.
"""

from __future__ import annotations

from openrlhf_ext.config.checks import Findings
from openrlhf_ext.config.describe import format_config, placement_table
from openrlhf_ext.config.errors import ConfigError, Violation
from openrlhf_ext.config.load import build_config, load_config
from openrlhf_ext.config.schema import RunConfig

__all__ = [
    "ConfigError",
    "Findings",
    "RunConfig",
    "Violation",
    "build_config",
    "format_config",
    "load_config",
    "placement_table",
]
