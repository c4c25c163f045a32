"""``python -m openrlhf_ext.config`` prints the tables of docs/configuration.md; ``--schema`` options.schema.json."""

import sys

from openrlhf_ext.config.show import format_markdown, format_schema

sys.stdout.write(format_schema() if sys.argv[1:] == ["--schema"] else format_markdown())
