"""API keys: their file, and `python -m node.keys`, which makes, lists and revokes them."""
