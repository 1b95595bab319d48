"""Traffic accounting: reads the cores' counters into a ledger, and delivers its rows to controllers."""
