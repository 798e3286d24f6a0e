"""What a command tells its user when it can't go on."""


class UserError(Exception):
    """A one-line message for the command line: what was given, what is accepted. Exit code 2, no traceback."""
