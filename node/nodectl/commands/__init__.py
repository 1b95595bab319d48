"""The commands of nodectl: one module each, of which `node.nodectl.app` has the list."""
