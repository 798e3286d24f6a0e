"""RMS norm and rotary positions of queries and keys; see README.md in this folder."""
