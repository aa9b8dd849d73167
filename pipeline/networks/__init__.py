"""The network tracks: plain torch modules, and what serves them with fewer multiplications and fewer bits."""
