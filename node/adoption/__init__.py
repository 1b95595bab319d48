"""Adoption of cores that outlive a killed node: hand-over files for the next node, and a guard in case none comes."""
