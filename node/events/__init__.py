"""Numbered events about the node: `kinds` lists their kinds, `journal` keeps them for readers.

Parts of the node report to the `Journal`; controllers read it by StreamEvents.
"""
