"""A small true KDA + attention model on the CPU, and a worker that serves it from scheduler outputs."""
