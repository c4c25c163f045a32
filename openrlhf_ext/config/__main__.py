"""What is generated from the declarations of the options.

    python -m openrlhf_ext.config            the tables of docs/configuration.md, to standard output
    python -m openrlhf_ext.config --schema   openrlhf_ext/options.schema.json, to standard output
"""

import sys

from openrlhf_ext.config.schema import format_schema
from openrlhf_ext.config.show import format_markdown

sys.stdout.write(format_schema() if sys.argv[1:] == ["--schema"] else format_markdown())
