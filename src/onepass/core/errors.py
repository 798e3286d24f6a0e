"""What a command tells its user when it can't go on."""


class UserError(Exception):
    """A one-line message for the command line: what was given, what is accepted. Exit code 2, no traceback."""


def reason(error: OSError) -> str:
    """Say in a few words what the operating system refused."""
    return (error.strerror or str(error)).lower()


def printable(text: str) -> str:
    r"""Escape all that a terminal would obey or hide, so that a name shows as it is and stays on its line.

    Control characters, line feeds, changes of direction and bytes that are no text become escapes as Python writes
    them: a file named "a", escape, "[2J" is shown as a\x1b[2J.
    """
    return "".join(c if c == " " or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
