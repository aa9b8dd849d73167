"""Plain torch modules: loading through an adapter, steps, running, and judging what comes out."""
