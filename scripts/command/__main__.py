"""`python -m favor_command` is the command `favor`."""

from favor_command.command import cli

if __name__ == "__main__":
    cli()
