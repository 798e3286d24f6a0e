"""Row-wise weighted sum; see README.md in this folder."""
