"""`penstock completion SHELL`: prints what makes a shell complete commands and flags.

The flags are those that each command's own --help shows, so no second list of them is kept.
"""

import argparse
import contextlib
import importlib
import io
import re
import sys
from collections.abc import Sequence

import shtab

from penstock.schemas.process.exit_status import BAD_USAGE

PROGRAM = "penstock completion"
FLAG = re.compile(r"(--[a-z][\w-]*)(?:[ ]\{([\w,-]+)\})?")
USAGE = f"""usage: {PROGRAM} {{{"|".join(shtab.SUPPORTED_SHELLS)}}}

Print a script for the shell, as in
  {PROGRAM} bash > ~/.local/share/bash-completion/completions/penstock"""


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0] not in shtab.SUPPORTED_SHELLS:
        is_asked = [*argv] in (["-h"], ["--help"])
        print(USAGE, file=sys.stdout if is_asked else sys.stderr)
        return 0 if is_asked else BAD_USAGE
    print(shtab.complete(_parser(), argv[0]))
    return 0


def _parser() -> argparse.ArgumentParser:
    """Return a parser that knows the names of all commands and flags, and nothing else of them."""
    from penstock.compose.cli import COMMANDS

    parser = argparse.ArgumentParser("penstock")
    commands = parser.add_subparsers()
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name == "completion":
            command.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
            continue
        try:
            command_module = importlib.import_module(f"penstock.{module}")
        except ModuleNotFoundError:  # not a part of this installation
            continue
        inner: dict[str, object] = getattr(command_module, "COMMANDS", {})
        subparsers = command.add_subparsers() if inner else None
        for subcommand in inner:
            assert subparsers is not None
            help_text = _help(command_module.main, [subcommand, "--help"])
            if not FLAG.search(help_text):  # it says what it takes where its subject is given
                help_text = _help(command_module.main, [subcommand, "x", "--help"])
            # shtab passes over one without a help.
            _add_flags(
                subparsers.add_parser(subcommand, help=f"penstock {name} {subcommand}"), help_text
            )
        if not inner:
            _add_flags(command, _help(command_module.main, ["--help"]))
    return parser


def _help(run: object, argv: list[str]) -> str:
    """Return what a command says of itself, or nothing where it does not."""
    assert callable(run)
    output = io.StringIO()
    silence = contextlib.redirect_stderr(io.StringIO())
    ends = contextlib.suppress(SystemExit, ModuleNotFoundError)
    with contextlib.redirect_stdout(output), silence, ends:
        run(argv)
    return output.getvalue()


def _add_flags(parser: argparse.ArgumentParser, help_text: str) -> None:
    flags: dict[str, list[str] | None] = {}
    for flag, choices in FLAG.findall(help_text):
        flags[flag] = flags.get(flag) or (choices.split(",") if choices else None)
    flags.pop("--help", None)
    for flag, values in flags.items():
        parser.add_argument(flag, choices=values)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
