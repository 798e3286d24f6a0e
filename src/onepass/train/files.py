"""The file functions of `onepass.core.files` under the name that callers of the training job use."""

from onepass.core.files import cut, extend, open_regular, partial_of, read, sync_directory, write

__all__ = ["cut", "extend", "open_regular", "partial_of", "read", "sync_directory", "write"]
