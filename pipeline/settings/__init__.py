"""params.yaml as typed, strict, frozen objects: what all kinds of products share."""
