"""Records that others made (lm-eval samples, inspect_ai logs, tables), read as the gate's own paired cases."""
