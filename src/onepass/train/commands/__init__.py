"""What all commands share: files that survive a kill, options, errors that a user reads, extras."""
