"""What outlives the node: its directory, the file in it, and when that is written."""
