"""The option table as text for ``--help`` and as Markdown for the documentation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby

from openrlhf_ext.config.options import Option, option_table
from openrlhf_ext.config.upstream import DIFFERENCES

_WIDTH = 110
_USAGE = """\
usage: python -m openrlhf_ext.cli.train_ppo_ray [--config FILE.yaml ...] [--entity.name value ...]

Names are OpenRLHF's; options marked + are added by openrlhf_ext. Precedence: defaults, then files in order, then the
command line. A bare --x.y_enable switches a flag on, true and false are accepted too; null unsets a value.
--help ENTITY shows one group. Options of OpenRLHF that are refused are listed at the end.
"""


def format_help(pattern: str = "") -> str:
    """The options whose group or name matches ``pattern`` (all by default), grouped, with type, default and help."""
    chosen = _matching(pattern)
    if not chosen:
        return f"no option matches {pattern!r}; groups: {', '.join(_groups())}\n"
    supported = [option for option in chosen if option.unsupported is None]
    refused = [option for option in chosen if option.unsupported is not None]
    blocks = [_USAGE]
    for group, options in groupby(supported, key=_group):
        blocks.append("\n".join([f"{group}:", *(_help_entry(option) for option in options)]) + "\n")
    if refused:
        blocks.append("\n".join(["refused unless left at their default:", *map(_refused_entry, refused)]) + "\n")
    return "\n".join(blocks)


def format_markdown() -> str:
    """The section of docs/configuration.md that is generated."""
    options = list(option_table().values())
    supported = [option for option in options if option.unsupported is None]
    refused = [option for option in options if option.unsupported is not None]
    lines: list[str] = []
    for group, members in groupby(supported, key=_group):
        rows = [_markdown_row(option) for option in members]
        lines += [f"### {group}", "", *_markdown_table(("option", "type", "default", "meaning"), rows), ""]
    lines += ["### Options of OpenRLHF that are refused", ""]
    lines += [*_markdown_table(("option", "inert value", "why", "instead"), map(_refused_row, refused)), ""]
    lines += ["### Where defaults or choices differ from OpenRLHF", ""]
    rows = [(f"`{entry.name}`", entry.upstream, entry.ours, entry.why) for entry in DIFFERENCES]
    lines += _markdown_table(("option", "OpenRLHF", "here", "why"), rows)
    return "\n".join(lines) + "\n"


def _matching(pattern: str) -> list[Option]:
    pattern = pattern.removeprefix("--")
    options = list(option_table().values())
    in_group = [option for option in options if option.name == pattern or option.name.startswith(f"{pattern}.")]
    return in_group or [option for option in options if pattern in option.name]


def _groups() -> list[str]:
    return list(dict.fromkeys(_group(option) for option in option_table().values()))


def _group(option: Option) -> str:
    return option.entity or "top level"


def _help_entry(option: Option) -> str:
    mark = "+" if option.is_extension else " "
    head = f" {mark} --{_shown_name(option)}  <{option.expects}>"
    default = f" [{option.default}]" if option.default else ""
    return "\n".join(
        [head, *textwrap.wrap(option.help + default, _WIDTH, initial_indent=" " * 7, subsequent_indent=" " * 7)]
    )


def _refused_entry(option: Option) -> str:
    assert option.unsupported is not None
    text = f"--{option.name} [{option.default}]: {option.unsupported.why}; {option.unsupported.instead}"
    return textwrap.fill(text, _WIDTH, initial_indent="   ", subsequent_indent=" " * 7)


def _shown_name(option: Option) -> str:
    return option.name + (".<key>" if option.arity == "open" else "")


def _markdown_row(option: Option) -> Sequence[str]:
    mark = " +" if option.is_extension else ""
    return f"`{_shown_name(option)}`{mark}", option.expects, _code(option.default), option.help


def _refused_row(option: Option) -> Sequence[str]:
    assert option.unsupported is not None
    return f"`{option.name}`", _code(option.default), option.unsupported.why, option.unsupported.instead


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _markdown_table(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
