"""A core as a child process: spawned, leashed, waited for, ended, and found again if it was left behind."""
