"""Steps that turn a checkpoint into a candidate: one step kind a file, listed in `registry.py`.

`layers.py` plans which layers a step covers, and `calibration.py` picks the texts it sees.
`llm_compressor.py` is the only importer of that library. `quantize.py` runs a step from source to
checked output, and `coverage.py` reads the output back. `candidate.py` puts it all together.
"""
