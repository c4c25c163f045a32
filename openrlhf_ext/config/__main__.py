"""``python -m openrlhf_ext.config`` writes the generated section of docs/configuration.md to standard output."""

import sys

from openrlhf_ext.config.show import format_markdown

sys.stdout.write(format_markdown())
