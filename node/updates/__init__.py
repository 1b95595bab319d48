"""Other versions of what is on the node, brought in while it serves: cores, lists of addresses, the node itself."""
