"""The commands of nodectl, related ones in one module; `node.nodectl.app` lists them."""
