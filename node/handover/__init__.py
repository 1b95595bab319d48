"""Hand-over: a keeper holds the cores while the node below it is replaced, after its death or for an upgrade."""
