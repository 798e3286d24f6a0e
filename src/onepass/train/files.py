"""The files of a run: `onepass.core.files` under the name that the main job's callers know."""

from onepass.core.files import cut, extend, open_regular, partial_of, read, sync_directory, write

__all__ = ["cut", "extend", "open_regular", "partial_of", "read", "sync_directory", "write"]
