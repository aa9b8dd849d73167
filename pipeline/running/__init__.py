"""How work is run: processes, journals, timing, environments, weight files, and which code a stage runs."""
