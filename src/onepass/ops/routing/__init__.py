"""Routing: score tokens, gather the chosen ones, add the heavy branch's gated output to their rows."""
