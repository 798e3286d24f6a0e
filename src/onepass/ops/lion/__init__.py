"""The Lion update over many tensors; see README.md in this folder."""
