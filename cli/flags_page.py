"""Writes `docs/flags.md`: `python -m specdec_cli.flags_page > docs/flags.md`."""

from __future__ import annotations

from specdec_cli.flags import Flag
from specdec_cli.main import COMMANDS
from specdec_cli.signature import metavar, shown_default

HEAD = """# Flags

Made from the rows in `cli/flags/` by `make docs`; do not edit.

- A value is the next word, also if it begins with `-`; behind long names `--name=value` works too.
  In long names `_` reads as `-`. Single-dash names are whole words, never clusters.
- Precedence: defaults < what the model file recommends (`general.sampling.*`) < environment <
  command line; the last of two words for one thing wins. Flags that may be given several times add
  up over environment and command line.
- Switches read `on`, `enabled`, `true`, `1` and `off`, `disabled`, `false`, `0` from their
  variable. Those with a `--no-` form are off if `LLAMA_ARG_NO_...` exists, whatever its value.
- llama.cpp's `config.ini` files are not read.
- *No effect*: the value is checked, and a line on stderr says that nothing acts on it. *Error*: the
  run ends with exit code 2.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    shown: set[str] = set()
    for name, command in COMMANDS.items():
        parts.append(f"## specdec {name}\n\n{command.help}\n")
        again = [panel.title for panel in command.panels if panel.title in shown]
        if again:
            parts.append(f"As for the commands above: {'; '.join(again)}.\n")
        for panel in command.panels:
            if panel.title in shown:
                continue
            shown.add(panel.title)
            rows = "\n".join(_row(flag) for flag in panel.flags)
            parts.append(f"### {panel.title}\n\n{_TABLE}\n{rows}\n")
    return "\n".join(parts)


_TABLE = "| flag | value | default | environment | what it does |\n|---|---|---|---|---|"


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.names)
    if flag.off:
        names += "; off: " + ", ".join(f"`{name}`" for name in flag.off)
    value, default = metavar(flag), shown_default(flag)
    cells = (
        names,
        f"`{value}`" if value else "",
        f"`{default}`" if default else "",
        f"`{flag.env}`" if flag.env else "",
        flag.help,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(page(), end="")
