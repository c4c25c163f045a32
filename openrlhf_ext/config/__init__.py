"""Typed options of a run: the sections, loading from YAML and command line, and every check that
needs no GPU.

Imports pydantic and PyYAML only. Users of this package call :func:`load_config`; see
docs/configuration.md. To read it:
``sections`` hold the options, each declared once, ``run_config`` what follows from them; ``rules``,
``model_rules`` and ``file_rules`` what is refused and warned about; ``load`` how YAML and words
become a configuration; ``show`` what users see.
"""

from __future__ import annotations

from openrlhf_ext.config.load import build_config, load_config
from openrlhf_ext.config.rules import Findings
from openrlhf_ext.config.run_config import RunConfig, option_table
from openrlhf_ext.config.show import format_config, placement_table
from openrlhf_ext.options import ConfigError, Violation, value_of

__all__ = [
    "ConfigError",
    "Findings",
    "RunConfig",
    "Violation",
    "build_config",
    "format_config",
    "load_config",
    "option_table",
    "placement_table",
    "value_of",
]
