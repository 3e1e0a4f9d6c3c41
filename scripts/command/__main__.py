"""Runs the command `favor` as `python -m favor_command`."""

from favor_command.command import cli

if __name__ == "__main__":
    cli()
