"""Real cores with real traffic, and the node as a process."""
