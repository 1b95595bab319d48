"""The one backend: starts, stops, crashes, its users, and how both get into the runs of a core."""
