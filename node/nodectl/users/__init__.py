"""Users for nodectl, pure: read from tables, JSON and exports of panels, made, and compared with what a node has."""
