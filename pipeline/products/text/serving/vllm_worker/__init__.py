"""The folder that goes on the PYTHONPATH of vLLM, whose environment has none of this project's libraries."""
