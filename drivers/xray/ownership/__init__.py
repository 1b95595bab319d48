"""Which user each connection of a core belongs to, by its access lines, its users online and the kernel's list."""
