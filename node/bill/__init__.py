"""The bill: what the core has counted beside what the machine's interfaces have carried, with the difference."""
