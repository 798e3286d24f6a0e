"""Routing: score tokens, gather the chosen ones, add back what the heavy branch made of them."""
