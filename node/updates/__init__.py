"""Updates of what is on the node while it serves: cores, geo files, the node itself."""
