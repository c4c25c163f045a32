"""`python -m openrlhf_ext.patches` prints the table of docs/operating.md."""

from __future__ import annotations

from openrlhf_ext.patches import PATCHES
from openrlhf_ext.patches.base import Patch


def render_table() -> str:
    """All patches as a Markdown table; each file's docstring says when to remove it."""
    header = "| patch | dependency | what is wrong there | what the patch does |\n|---|---|---|---|"
    return "\n".join([header, *map(_row, PATCHES)])


def _row(patch: Patch) -> str:
    dependency = f"{patch.dependency} {', '.join(patch.versions)}"
    return f"| `{patch.name}` | {dependency} | {patch.problem} | {patch.change} |"


if __name__ == "__main__":
    print(render_table())
