"""The engine: who runs, who may, and how much. It owns the runner, the runs, their traffic and the limits of users."""
