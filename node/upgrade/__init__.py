"""Upgrades in place: the process executes the next version, hands over its cores, and goes back if that fails."""
