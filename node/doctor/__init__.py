"""What commonly goes wrong with a node: checks that take values and return findings, each with what to do about it.

`checks` has them all; `facts` and `config` look at the machine and at what a node runs. No command line is in here.
"""
