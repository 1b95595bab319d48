"""The cores that the node can run, and the tools that their drivers share. `registry` names them."""
