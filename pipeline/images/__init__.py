"""The image product: diffusers pipelines, the steps on them, and the eval that renders and judges images."""
