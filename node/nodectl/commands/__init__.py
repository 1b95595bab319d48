"""The commands of nodectl, one module each; `node.nodectl.app` lists them."""
