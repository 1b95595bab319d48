"""Users for nodectl, pure: read from tables, JSON and exports of panels, generated, and compared with a node's."""
