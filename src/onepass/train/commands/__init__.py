"""What all commands share: files that survive a kill, options and extras, errors that a user reads."""
