"""The matched-work benchmark: reference and candidate timed side by side on the same prompts and tokens."""
