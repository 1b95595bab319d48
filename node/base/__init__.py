"""Small tools that every room uses, and that know no room: errors, logs, waiting, timers, threads, files."""
