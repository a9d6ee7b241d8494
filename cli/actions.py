"""Flags that replace the command: lists that are printed, then the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specdec.version import __version__
from specdec_cli.flags import Flag


def version() -> None:
    """Prints the version."""
    print(f"specdec {__version__}")


def list_devices() -> None:
    """Prints the names that `--device` takes, the one that is taken by default last."""
    from specdec.resources import describe_device, devices

    print("Available devices:")
    for name in devices():
        print(f"  {name}: {describe_device(name)}")


def cache_list() -> None:
    """Prints the model files that were downloaded, with their size."""
    from specdec.resources import cached_models

    models = cached_models()
    print(f"number of models in cache: {len(models)}")
    for name, size in models:
        print(f"  {name}  {size / 1e6:.1f} MB")


def completion_bash(commands: Mapping[str, Sequence[Flag]]) -> None:
    """Prints a script that completes commands, flags and file names in bash."""
    names = {
        command: " ".join(name for flag in flags for name in (*flag.names, *flag.off))
        for command, flags in commands.items()
    }
    cases = "\n".join(f'    {command}) words="{words}" ;;' for command, words in names.items())
    print(_SCRIPT.format(commands=" ".join(commands), cases=cases))


ACTIONS: Mapping[str, Callable[[], None]] = {
    "--version": version,
    "--list-devices": list_devices,
    "--cache-list": cache_list,
}
"""Canonical name of a flag -> what it does; `--completion-bash` needs the commands too."""

_SCRIPT = """_specdec() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words="{commands} --help --version --list-devices"
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [[ "$word" == -* || $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _specdec specdec"""
