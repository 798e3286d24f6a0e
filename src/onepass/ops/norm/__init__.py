"""Layer and RMS normalisation; see README.md in this folder."""
