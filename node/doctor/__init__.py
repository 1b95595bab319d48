"""`nodectl doctor`: checks for common problems of a node. Each finding has a remedy.

`findings` lists the checks and `local` runs them all. `machine`, `credentials` and `running` judge the values that
`kernel`, `network` and `config` read. The command line is in `node.nodectl`.
"""
