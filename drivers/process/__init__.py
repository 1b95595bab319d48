"""Cores as child processes: spawn, confine, await and end them, and adopt or kill those of an earlier node."""
