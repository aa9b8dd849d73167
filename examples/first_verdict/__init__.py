"""Records of the shipped agent before and after INT4, for a first verdict without a model: `make demo`."""
