"""The only code that operators share; imports no operator."""
