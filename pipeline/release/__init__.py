"""The release bundle: what went out, on which evidence, and whether the verdict still follows from it."""
