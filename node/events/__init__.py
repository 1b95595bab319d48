"""What happened to the node, as events with numbers: `kinds` says what there is, `journal` keeps them for readers.

A part that has something to tell is given the `Journal`; controllers read it by StreamEvents.
"""
