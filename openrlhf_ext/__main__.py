"""``python -m openrlhf_ext COMMAND ...``: the same as ``openrlhf-ext COMMAND ...``."""

import sys

from openrlhf_ext.cli.main import main

if __name__ == "__main__":  # processes that are spawned import this file under another name
    sys.exit(main())
